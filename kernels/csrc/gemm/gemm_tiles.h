// Products through the tile registers (simd/tiles.h): blocks of up to 32 activation rows against a panel.
//
// A block of at most 16 rows meets all 64 lanes in one pass over the panel, which reads memory in order. More rows are
// two tiles and meet 32 lanes in a pass, so that every tile loaded is used twice; a panel then comes in slices of k
// that stay in the cache, and coded weights are decoded by the first pass over a slice for all that follow.
//
// Promises: a row's sums are those of gemm_chains.h, whatever block it is in. Must not know: how rows were prepared.
#pragma once

#include "simd/simd.h"

#if defined(QUIRE_AMX)

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_prefetch.h"
#include "gemm/gemm_rows.h"
#include "gemm/gemm_slabs.h"

namespace quire {

// Steps of a slice: 32 of its lanes are 32 KiB, which stay in the first-level cache while the blocks pass by.
constexpr int64_t kTiledSlice = 256;
// Blocks that one panel after the other meets: 256 rows, whose values stay in the second-level cache meanwhile.
constexpr int64_t kChunkBlocks = 8;
constexpr int64_t kSumsStride = kPanelRows * sizeof(float);

// All blocks in chunks as equal as possible, and enough of them that no worker is without a piece.
struct Chunks {
  Chunks(int64_t num_blocks, int64_t panels, int64_t workers) : blocks(num_blocks) {
    const int64_t for_cache = (blocks + kChunkBlocks - 1) / kChunkBlocks;
    const int64_t for_all = std::min(blocks, (workers + panels - 1) / std::max<int64_t>(panels, 1));
    count = std::max(for_cache, for_all);
  }
  int64_t begin(int64_t chunk) const { return blocks * chunk / count; }

  int64_t blocks, count;
};

// One tile of rows against 64 lanes over `count` slabs: `a` is [count][rows][64 bytes], `sums` [rows][64].
template <typename Kind, typename Slabs>
void multiply_wide(const char* a, int64_t rows, int64_t count, Slabs slabs, float* sums, bool resume) {
  unrolled<kVecs>([&](auto v) {
    if (!resume) return tile_zero<v>();
    tile_load<v>(sums + v * kTileWidth, kSumsStride);
  });
  for (int64_t slab = 0; slab < count; ++slab, a += rows * kTileBytes) {
    const char* weights = slabs.at(slab);
    tile_load<4>(a, kTileBytes);
    unrolled<kVecs>([&](auto v) {
      constexpr int kWeights = 6 + v % 2;  // one is loaded while the other one is used
      tile_load<kWeights>(weights + v * kTileBytes, kStepBytes);
      Kind::template tile_dot<v, 4, kWeights>();
    });
  }
  unrolled<kVecs>([&](auto v) { tile_store<v>(sums + v * kTileWidth, kSumsStride); });
}

// Two tiles of rows, `first` in the upper one, against the 32 lanes from `lane` on: `a` is [count][height][64 bytes].
template <typename Kind, typename Slabs>
void multiply_square(const char* a, int64_t first, int64_t height, int64_t count, Slabs slabs, int64_t lane,
                     float* sums, bool resume) {
  float* const upper = sums + lane;
  float* const lower = upper + first * kPanelRows;
  if (resume) {
    tile_load<0>(upper, kSumsStride);
    tile_load<1>(upper + kTileWidth, kSumsStride);
    tile_load<2>(lower, kSumsStride);
    tile_load<3>(lower + kTileWidth, kSumsStride);
  } else {
    unrolled<4>([](auto tile) { tile_zero<tile>(); });
  }
  for (int64_t slab = 0; slab < count; ++slab, a += height * kTileBytes) {
    const char* weights = slabs.at(slab) + lane * 4;
    tile_load<6>(weights, kStepBytes);
    tile_load<4>(a, kTileBytes);
    Kind::template tile_dot<0, 4, 6>();
    tile_load<7>(weights + kTileBytes, kStepBytes);
    Kind::template tile_dot<1, 4, 7>();
    tile_load<5>(a + first * kTileBytes, kTileBytes);
    Kind::template tile_dot<2, 5, 6>();
    Kind::template tile_dot<3, 5, 7>();
  }
  tile_store<0>(upper, kSumsStride);
  tile_store<1>(upper + kTileWidth, kSumsStride);
  tile_store<2>(lower, kSumsStride);
  tile_store<3>(lower + kTileWidth, kSumsStride);
}

// The blocks [begin, end) of `rows` against one panel. `partial`: room for their sums; `decoded`: for a slice's
// weights.
template <typename Kind>
class TiledPiece {
 public:
  TiledPiece(const Linear& w, int64_t panel, const TileBlocks& blocks, int64_t begin, int64_t end, const char* rows)
      : blocks_(blocks),
        begin_(begin),
        end_(end),
        rows_(rows),
        panel_(panel_at(w, panel)),
        steps_(w.k / Kind::kValuesPerStep) {
    if constexpr (Kind::kMayBeCoded) coded_ = Kind::is_coded(w, panel);
  }

  bool wide() const { return blocks_.second == 0; }
  int64_t num_passes() const { return (end_ - begin_) * (wide() ? 1 : 2); }
  int64_t step_bytes() const { return coded_ ? kCodedStepBytes : kStepBytes; }

  // `after`: what the worker will read next, or null: not known.
  void multiply(Cold cold, const char* after, const Prefetcher& prefetcher, float* partial, char* decoded) const {
    const int64_t slice = wide() ? steps_ : kTiledSlice;
    for (int64_t step = 0; step < steps_; step += slice) {
      const int64_t count = std::min(slice, steps_ - step);
      const bool ends = step + count == steps_;
      const char* from = at(step);
      // With nothing known to follow, the start of this slice, which is in the cache.
      const char* next = !ends ? at(step + count) : after != nullptr ? after : from;
      for (int64_t pass = 0; pass < num_passes(); ++pass) {
        const Ahead ahead = prefetcher.of(pass, count, next, ends && after == nullptr);
        const int64_t depth = count / kTileDepth;
        const Fetching fetching(pass == 0 ? cold : Cold::kNo, from, step_bytes() * kTileDepth, depth, ahead);
        if (!coded_ || pass > 0) {
          one_pass(pass, step, depth, PlainSlabs(coded_ ? decoded : from, fetching), partial);
        } else if constexpr (Kind::kMayBeCoded) {
          const DecodedSlabs slabs(CodedSteps(panel_, step), depth, num_passes() > 1, decoded, fetching);
          one_pass(pass, step, depth, slabs, partial);
        }
      }
    }
  }

 private:
  const char* at(int64_t step) const {
    if constexpr (Kind::kMayBeCoded) {
      if (coded_) return CodedSteps(panel_, step).at();
    }
    return panel_ + step * kStepBytes;
  }

  // All blocks with the first 32 lanes, then all with the others.
  template <typename Slabs>
  void one_pass(int64_t pass, int64_t step, int64_t depth, const Slabs& slabs, float* partial) const {
    const int64_t block = pass % (end_ - begin_), lane = pass / (end_ - begin_) * 2 * kTileWidth;
    const char* a = rows_ + blocks_.offset(begin_ + block, step / kTileDepth);
    float* sums = partial + block * blocks_.height * kPanelRows;
    if (wide()) return multiply_wide<Kind>(a, blocks_.height, depth, slabs, sums, step > 0);
    multiply_square<Kind>(a, blocks_.first, blocks_.height, depth, slabs, lane, sums, step > 0);
  }

  const TileBlocks& blocks_;
  int64_t begin_, end_;
  const char* rows_;
  const char* panel_;
  int64_t steps_;
  bool coded_ = false;
};

template <typename Kind>
int64_t tiled_sums_bytes(const Linear& w, int64_t m) {
  const TileBlocks blocks(m, w.k / Kind::kValuesPerStep);
  return std::min(blocks.count, kChunkBlocks) * blocks.height * kSumsStride;
}

// Sums of a chunk, then decoded weights of a slice.
template <typename Kind>
int64_t tiled_bytes(const Linear& w, int64_t m) {
  return tiled_sums_bytes<Kind>(w, m) + (Kind::kMayBeCoded ? kTiledSlice * kStepBytes : 0);
}

// As gemm_worker; `scratch` has tiled_bytes.
template <typename Kind>
void gemm_tiled(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  const int64_t num_panels = panel_count(w);
  const TileBlocks blocks(rows.m, w.k / Kind::kValuesPerStep);
  const Chunks chunks(blocks.count, num_panels, pieces.workers());
  float* const partial = reinterpret_cast<float*>(scratch);
  char* const decoded = scratch + tiled_sums_bytes<Kind>(w, rows.m);
  const TilesInUse tiles;
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, num_panels * chunks.count, 1, &piece)) {
    const int64_t panel = piece.begin % num_panels, chunk = piece.begin / num_panels;
    const int64_t begin = chunks.begin(chunk), end = chunks.begin(chunk + 1);
    const TiledPiece<Kind> work(w, panel, blocks, begin, end, static_cast<const char*>(rows.data));
    const Prefetcher prefetcher(work.num_passes(), work.step_bytes(), kStepBytes / 4);
    const Cold cold = first_of(work.num_passes(), piece.begin == fetched, pieces.fetch());
    if (w.scales != nullptr) prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    if (w.sums != nullptr) prefetch<kPanelRows * 4>(w.sums + panel * kPanelRows);
    configure_tiles(static_cast<int>(blocks.first), static_cast<int>(work.wide() ? blocks.first : blocks.second));
    const char* after = piece.next < 0 ? nullptr : panel_at(w, piece.next % num_panels);
    work.multiply(cold, after, prefetcher, partial, decoded);
    for (int64_t block = begin; block < end; ++block) {
      const float* sums = partial + (block - begin) * blocks.height * kPanelRows;
      finish_tile<Kind>(w, rows, out, block * blocks.height, blocks.live(block), panel, sums);
    }
    if (prefetcher.all) fetched = piece.next;
  }
}

}  // namespace quire

#endif
