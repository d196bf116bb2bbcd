// Products of weights as others quantised them (stored.h), through the tile registers: a slice of a panel is decoded
// once for all rows, tiles compute the sums of a group, ordinary registers scale these and add them to the groups
// before.
//
// Promises: the bits of gemm_stored.h. Must not know: how rows were prepared.
#pragma once

#include "simd/simd.h"

#if defined(QUIRE_AMX)

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_rows.h"
#include "gemm/gemm_stored.h"
#include "gemm/gemm_tiles.h"

namespace quire {

constexpr int64_t kStoredSliceSteps = 128;  // 32 KiB of decoded weights

// Totals and parts of a chunk's rows, then the decoded weights of a slice.
inline int64_t stored_tiles_sums_bytes(const Linear& w, int64_t m) {
  const TileBlocks blocks(m, w.k / 2);
  return 2 * std::min(blocks.count, kChunkBlocks) * blocks.height * kSumsStride;
}
inline int64_t stored_tiles_bytes(const Linear& w, int64_t m) {
  return stored_tiles_sums_bytes(w, m) + kStoredSliceSteps * kStepBytes;
}

// The blocks of activation rows [begin, end) against one panel.
template <typename Kind>
class StoredTiles {
 public:
  StoredTiles(const Linear& w, const Rows& rows, const TileBlocks& blocks, int64_t begin, int64_t end, int64_t index,
              char* scratch)
      : panel_(w, Kind::Codes::kBits, index),
        codes_(w),
        rows_(rows),
        blocks_(blocks),
        begin_(begin),
        end_(end),
        sums_(reinterpret_cast<float*>(scratch)),
        decoded_(scratch + stored_tiles_sums_bytes(w, rows.m)) {}

  // `after`: what the worker will read next.
  void multiply(const char* after) const {
    const StoredLayout& layout = panel_.layout;
    const int64_t slice = kStoredSliceSteps / layout.steps;
    for (int64_t from = 0; from < layout.blocks; from += slice) {
      const int64_t to = std::min(from + slice, layout.blocks);
      decode_stored(panel_, codes_, from, to, decoded_, Cold::kOnce, after);
      for (int64_t block = begin_; block < end_; ++block) multiply_slice(block, from, to);
    }
  }

  const float* totals(int64_t block) const { return sums_ + (block - begin_) * 2 * blocks_.height * kPanelRows; }

 private:
  // The weights from one group's end to the next, as far as the slice has them.
  void multiply_slice(int64_t block, int64_t from, int64_t to) const {
    const StoredLayout& layout = panel_.layout;
    float* const total = const_cast<float*>(totals(block));
    float* const part = total + blocks_.height * kPanelRows;
    if (from == 0) std::fill(total, part, 0.0f);
    for (int64_t at = from; at < to;) {
      const int64_t g = at / layout.group, end = std::min((g + 1) * layout.group, layout.blocks);
      const int64_t next = std::min(end, to);
      multiply_part(block, at, next - at, decoded_ + (at - from) * layout.steps * kStepBytes, at > g * layout.group,
                    part);
      if (next == end) add(block, g, part, total);
      at = next;
    }
  }

  void multiply_part(int64_t block, int64_t at, int64_t count, const char* weights, bool resume, float* part) const {
    const int64_t step = at * panel_.layout.steps;
    const char* a = static_cast<const char*>(rows_.data) + blocks_.offset(block, step / kTileDepth);
    a += step % kTileDepth * 4;  // groups of half a tile's depth are multiplied one by one
    const PlainSlabs slabs(weights, Fetching(Cold::kNo, weights, 0, count, Ahead{weights, weights, 0, 0}));
    if (blocks_.second == 0) return multiply_wide<Kind>(a, blocks_.height, count, slabs, part, resume);
    for (int64_t lane = 0; lane < kPanelRows; lane += 2 * kTileWidth) {
      multiply_square<Kind>(a, blocks_.first, blocks_.height, count, slabs, lane, part, resume);
    }
  }

  void add(int64_t block, int64_t g, const float* part, float* total) const {
    const int64_t live = blocks_.live(block), groups = panel_.layout.groups;
    const float* sums = reinterpret_cast<const float*>(rows_.sums) + block * blocks_.height * groups;
    for (int64_t r = 0; r < live; ++r) {
      Vec of_row[1][kVecs];
      unrolled<kVecs>([&](auto v) { of_row[0][v] = vload(part + r * kPanelRows + v * kLanes); });
      add_group<1, kVecs>(panel_, g, 0, of_row, sums + r * groups, groups, total + r * kPanelRows);
    }
  }

  const StoredPanel panel_;
  const typename Kind::Codes codes_;
  const Rows& rows_;
  const TileBlocks& blocks_;
  const int64_t begin_, end_;
  float* const sums_;
  char* const decoded_;
};

// As gemm_worker; `scratch` has stored_tiles_bytes.
template <typename Kind>
void gemm_stored_tiles(Pieces& pieces, int worker, const Linear& w, const Rows& rows, const Output& out,
                       char* scratch) {
  const int64_t num_panels = panel_count(w);
  const TileBlocks blocks(rows.m, w.k / Kind::kValuesPerStep);
  const Chunks chunks(blocks.count, num_panels, pieces.workers());
  const int depth = static_cast<int>(StoredLayout(w, Kind::Codes::kBits).steps);
  const TilesInUse tiles;
  configure_tiles(static_cast<int>(blocks.first), static_cast<int>(blocks.second == 0 ? blocks.first : blocks.second),
                  depth);
  Piece piece;
  while (pieces.take(worker, num_panels * chunks.count, 1, &piece)) {
    const int64_t panel = piece.begin % num_panels, chunk = piece.begin / num_panels;
    const int64_t begin = chunks.begin(chunk), end = chunks.begin(chunk + 1);
    const StoredTiles<Kind> work(w, rows, blocks, begin, end, panel, scratch);
    work.multiply(panel_at(w, piece.next < 0 ? panel : piece.next % num_panels));
    for (int64_t block = begin; block < end; ++block) {
      finish_tile<Kind>(w, rows, out, block * blocks.height, blocks.live(block), panel, work.totals(block));
    }
  }
}

}  // namespace quire

#endif
