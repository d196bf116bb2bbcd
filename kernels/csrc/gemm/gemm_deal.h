// How a product's pieces come to a worker: from a run that is about this product alone, or from one that deals the
// panels of several products, each to whoever is there.
//
// Promises: every panel of every product is dealt once, with all of its rows. Must not know: kinds of weights,
// products.
#pragma once

#include <cstdint>

#include "runtime/pool.h"
#include "simd/prefetch.h"

namespace quire {

// The panels of several products, one product's behind the other's, as one worker takes them.
struct PanelQueue {
  Pieces& pieces;
  int64_t total;  // of all products
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
  Deal(Pieces& pieces, Fetch fetch) : fetch_(fetch), pieces_(pieces) {}
  // Of the queue's panels those of one product, `panels` from `first` on, until one of another product follows.
  Deal(PanelQueue& queue, int64_t first, int64_t panels, Fetch fetch)
      : fetch_(fetch), pieces_(queue.pieces), queue_(&queue), first_(first), panels_(panels) {}

  // What a worker asks of the caches for panels that are read once.
  Fetch fetch() const { return fetch_; }

  // A panel that is dealt among those of others is not shared with other workers.
  int64_t workers() const { return queue_ == nullptr ? pieces_.workers() : 1; }

  bool take(int worker, int64_t count, int64_t grain, Piece* piece) {
    if (queue_ == nullptr) return pieces_.take(worker, count, grain, piece);
    if (at_ >= 0 && at_ + panels_ < count) {  // the panel's next rows
      at_ += panels_;
    } else {
      if (!queue_->fetch(worker) || !is_own(queue_->held.begin)) return false;
      queue_->holds = false;
      at_ = queue_->held.begin - first_;
      next_ = is_own(queue_->held.next) ? queue_->held.next - first_ : -1;
    }
    *piece = {at_, at_ + 1, next_};
    return true;
  }

 private:
  bool is_own(int64_t panel) const { return panel >= first_ && panel < first_ + panels_; }

  const Fetch fetch_;
  Pieces& pieces_;
  PanelQueue* queue_ = nullptr;
  int64_t first_ = 0, panels_ = 0;
  int64_t at_ = -1, next_ = -1;
};

}  // namespace quire
