// How a product's pieces come to a worker: from a run that is about this product alone, or from one that deals the
// panels of several products, each to whoever is there.
//
// Promises: every panel of every product is dealt once, with all of its rows. Must not know: kinds of weights,
// products.
#pragma once

#include <cstdint>

#include "runtime/pool.h"

namespace quire {

// The panels of several products, as one worker takes them: number product * panels + panel.
struct PanelQueue {
  Pieces& pieces;
  int64_t total;   // of all products
  int64_t panels;  // of one
  Piece held{};
  bool holds = false;

  // Whether there is a panel in `held` for the worker.
  bool fetch(int worker) {
    holds = holds || pieces.take(worker, total, 1, &held);
    return holds;
  }
};

class Deal {
 public:
  explicit Deal(Pieces& pieces) : pieces_(pieces) {}
  // Of the queue's panels those of one product, until one of another product follows.
  Deal(PanelQueue& queue, int64_t product) : pieces_(queue.pieces), queue_(&queue), product_(product) {}

  // A panel that is dealt among those of others is not shared with other workers.
  int64_t workers() const { return queue_ == nullptr ? pieces_.workers() : 1; }

  bool take(int worker, int64_t count, int64_t grain, Piece* piece) {
    if (queue_ == nullptr) return pieces_.take(worker, count, grain, piece);
    if (at_ >= 0 && at_ + queue_->panels < count) {  // the panel's next rows
      at_ += queue_->panels;
    } else {
      if (!queue_->fetch(worker) || queue_->held.begin / queue_->panels != product_) return false;
      queue_->holds = false;
      at_ = queue_->held.begin % queue_->panels;
      const int64_t next = queue_->held.next;
      next_ = next >= 0 && next / queue_->panels == product_ ? next % queue_->panels : -1;
    }
    *piece = {at_, at_ + 1, next_};
    return true;
  }

 private:
  Pieces& pieces_;
  PanelQueue* queue_ = nullptr;
  int64_t product_ = 0;
  int64_t at_ = -1, next_ = -1;
};

}  // namespace quire
