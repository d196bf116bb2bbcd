// The pieces in which a product is dealt to workers: panels, and where those are few for the workers, each panel's
// tiles of rows in groups.
//
// Promises: every tile of every panel belongs to one piece. A row's sums depend on neither its tile nor its group: any
// number of workers has the same. Must not know: kinds of weights, what a tile computes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/pool.h"

namespace quire {

class Partition {
 public:
  // Pieces of one panel follow each other, so that a worker finds its weights in the cache. `least_tiles`: so many are
  // worth reading a panel once more, only for work that is dealt more evenly; for workers that would have none, one is.
  Partition(int64_t panels, int64_t tiles, int64_t least_tiles, int64_t workers) : panels_(panels), tiles_(tiles) {
    if (panels >= kPiecesPerWorker * workers || panels == 0 || workers == 1) return;
    const int64_t for_evenness = std::min(rounded_up(kPiecesPerWorker * workers, panels), tiles / least_tiles);
    const int64_t for_all = std::min(rounded_up(workers, panels), tiles);
    groups_ = std::max({int64_t{1}, for_evenness, for_all});
  }

  int64_t pieces() const { return panels_ * groups_; }
  int64_t panel(int64_t piece) const { return piece / groups_; }
  // The tiles of a piece: [first, end).
  int64_t first_tile(int64_t piece) const { return tiles_ * (piece % groups_) / groups_; }
  int64_t end_tile(int64_t piece) const { return tiles_ * (piece % groups_ + 1) / groups_; }
  // The panel that a worker will read after the piece; -1: none that is known and another one.
  int64_t next_panel(const Piece& piece) const {
    return piece.next < 0 || panel(piece.next) == panel(piece.begin) ? -1 : panel(piece.next);
  }

 private:
  static constexpr int64_t kPiecesPerWorker = 4;
  static int64_t rounded_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

  const int64_t panels_, tiles_;
  int64_t groups_ = 1;
};

}  // namespace quire
