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
#include "gemm/gemm_group_tiles.h"
#include "gemm/gemm_rows.h"
#include "gemm/gemm_stored.h"
#include "gemm/gemm_tiles.h"

namespace quire {

constexpr int64_t kStoredSliceSteps = 128;                     // 32 KiB of decoded weights
constexpr int64_t kStoredSliceGroups = kStoredSliceSteps / 8;  // at most

// One group in the tile of its turn: `a` are activations in slabs `slab_bytes` apart, `b` weights in slabs one after
// the other.
template <int kTurn>
inline void sum_stored_in(const char* a, int64_t slab_bytes, const char* b, int64_t slabs, bool resume,
                          float (*part)[kTileWidth]) {
  if (resume) {
    tile_load<kTurn>(part, sizeof(part[0]));
  } else {
    tile_zero<kTurn>();
  }
  for (int64_t slab = 0; slab < slabs; ++slab, a += slab_bytes, b += kTileDepth * kTileBytes) {
    if (slab % 2 == 0) {
      tile_load<4>(a, kTileBytes);
      tile_load<6>(b, kTileBytes);
      tile_dot_bf16<kTurn, 4, 6>();
    } else {
      tile_load<5>(a, kTileBytes);
      tile_load<7>(b, kTileBytes);
      tile_dot_bf16<kTurn, 5, 7>();
    }
  }
  tile_store<kTurn>(part, sizeof(part[0]));
}
inline void sum_stored(int64_t turn, const char* a, int64_t slab_bytes, const char* b, int64_t slabs, bool resume,
                       float (*part)[kTileWidth]) {
  switch (turn) {
    case 0: return sum_stored_in<0>(a, slab_bytes, b, slabs, resume, part);
    case 1: return sum_stored_in<1>(a, slab_bytes, b, slabs, resume, part);
    case 2: return sum_stored_in<2>(a, slab_bytes, b, slabs, resume, part);
    default: return sum_stored_in<3>(a, slab_bytes, b, slabs, resume, part);
  }
}

// The groups of a slice, for 16 lanes: whole ones, or a part of a single one.
struct StoredSlice {
  int64_t first, groups;  // the first group, and how many
  int64_t steps;          // of a group, or of its part
  const char* weights;    // of the lanes, decoded: [groups * steps][16] pairs
  const float* scales;    // of the lanes, [groups][64]
  const float* offsets;   // likewise, or null
  bool resumes, ends;     // whether a single one goes on from the slice before, and whether it is complete
};

// `rows` activation rows, from the slice's first step on at `a`, against a slice. `group_sums`: the activations', of
// the first row, `stride` a row; `total` [rows][64] and `part` [rows][16] as of StoredSums. The rows kRow, see
// multiply_groups of gemm_group_tiles.h.
template <int... kRow>
[[gnu::noinline]] void multiply_stored(std::integer_sequence<int, kRow...>, const char* a, int64_t slab_bytes, int rows,
                                       const StoredSlice& slice, const float* group_sums, int64_t stride, float* total,
                                       float* part) {
  constexpr int kRows = sizeof...(kRow);
  alignas(64) float parts[kTurns][kRows][kTileWidth];
  for (auto& each : parts) {
    for (int row = rows; row < kRows; ++row) vstore(each[row], vzero());
  }
  const int64_t depth = std::min<int64_t>(slice.steps, kTileDepth), slabs = slice.steps / depth;
  if (slice.resumes || !slice.ends) {
    const auto kept = reinterpret_cast<float (*)[kTileWidth]>(part);
    sum_stored(0, a, slab_bytes, slice.weights, slabs, slice.resumes, kept);
    if (!slice.ends) return;
    for (int row = 0; row < rows; ++row) vstore(parts[0][row], vload(kept[row]));
  }
  const bool summed = slice.resumes;
  const bool first = slice.first == 0;
  Vec acc[kRows] = {(first ? vzero() : vload(total + kRow * kPanelRows))...};
  for (int64_t g = -kEarly; g < slice.groups; ++g) {
    const int64_t early = g + kEarly, turn = early % kTurns;
    if (early < slice.groups && !summed) {
      const int64_t step = early * slice.steps;
      const char* from = a + step / kTileDepth * slab_bytes + step % kTileDepth * 4;
      sum_stored(turn, from, slab_bytes, slice.weights + step * kTileBytes, slabs, false, parts[turn]);
    }
    if (g < 0) continue;
    const auto& of_group = parts[g % kTurns];
    const Vec scale = vload(slice.scales + g * kPanelRows);
    ((acc[kRow] = vfma(vload(of_group[kRow]), scale, acc[kRow])), ...);
    if (slice.offsets == nullptr) continue;
    const Vec offset = vload(slice.offsets + g * kPanelRows);
    const float* const x = group_sums + slice.first + g;
    ((acc[kRow] = vfma(offset, vset(x[std::min(kRow, rows - 1) * stride]), acc[kRow])), ...);
  }
  (vstore(total + kRow * kPanelRows, acc[kRow]), ...);
}

// Totals of a chunk's rows, every tile's with room for the largest, and parts of groups; then of a slice scales,
// offsets and decoded weights.
inline int64_t stored_tiles_sums_bytes(const Linear& w, int64_t m) {
  const TileBlocks blocks(m, w.k / 2);
  return std::min(blocks.count, kChunkBlocks) * 2 * kTileHeight * 2 * kSumsStride;
}
inline int64_t stored_tiles_bytes(const Linear& w, int64_t m) {
  return stored_tiles_sums_bytes(w, m) + 2 * kStoredSliceGroups * kSumsStride + kStoredSliceSteps * kStepBytes;
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
        scales_(reinterpret_cast<float*>(scratch + stored_tiles_sums_bytes(w, rows.m))),
        offsets_(scales_ + kStoredSliceGroups * kPanelRows),
        decoded_(reinterpret_cast<char*>(offsets_ + kStoredSliceGroups * kPanelRows)) {}

  // `cold`: of the panel's first slice; `after`: what the worker will read next, or null.
  void multiply(Cold cold, const char* after) const {
    const StoredLayout& layout = panel_.layout;
    const int64_t most = kStoredSliceSteps / layout.steps;
    const int64_t slice = layout.group >= most ? most : most / layout.group * layout.group;
    for (int64_t from = 0; from < layout.blocks;) {
      // A slice has whole groups, or is within one.
      const int64_t end_of_group = (from / layout.group + 1) * layout.group;
      int64_t to = std::min(from + slice, layout.blocks);
      if (layout.group > most) to = std::min(to, end_of_group);
      const bool last = to == layout.blocks;
      const char* next = last ? after : panel_.start + layout.block_at(to);
      decode_stored(panel_, codes_, from, to, decoded_, kTileBytes, kVecBytes, cold,
                    after == nullptr ? panel_.start : after);
      multiply_slice(from, to, next);
      cold = Cold::kNo;
      from = to;
    }
  }

  // Of the tile of a block's rows.
  const float* totals(int64_t block, int tile) const { return place(block, tile); }

 private:
  static constexpr int64_t kVecBytes = kStoredSliceSteps * kTileBytes;
  static constexpr int64_t kTileFloats = kTileHeight * kPanelRows;

  // A tile's totals, behind them its parts.
  float* place(int64_t block, int tile) const { return sums_ + ((block - begin_) * 2 + tile) * 2 * kTileFloats; }

  // `next`: what follows the slice, fetched meanwhile; null: nothing.
  void multiply_slice(int64_t from, int64_t to, const char* next) const {
    const StoredLayout& layout = panel_.layout;
    const int64_t g = from / layout.group, end = std::min((g + 1) * layout.group, layout.blocks);
    StoredSlice slice;
    slice.first = g;
    slice.groups = 1;
    slice.steps = (to - from) * layout.steps;
    slice.resumes = from > g * layout.group;
    slice.ends = to >= end;
    if (!slice.resumes && to > end) {
      slice.steps = layout.group * layout.steps;
      slice.groups = (to - from) / layout.group;
    }
    multiply_groups_of(slice, from, next);
    const int64_t rest = from + slice.groups * layout.group;
    if (rest < to) {  // the panel's last group, which is shorter
      slice.first += slice.groups;
      slice.steps = (to - rest) * layout.steps;
      slice.groups = 1;
      multiply_groups_of(slice, rest, nullptr, (rest - from) * layout.steps * kTileBytes);
    }
  }

  void multiply_groups_of(StoredSlice slice, int64_t from, const char* next, int64_t weights_at = 0) const {
    const StoredLayout& layout = panel_.layout;
    if (slice.ends) read_scales(slice);
    const int64_t passes = (end_ - begin_) * (blocks_.second > 0 ? 2 : 1) * kVecs;
    const int64_t bytes = next == nullptr ? 0 : kStoredSliceSteps / layout.steps * layout.block_bytes;
    const int64_t part = (bytes / passes + 63) / 64 * 64;
    const int64_t step = from * layout.steps;
    for (int64_t block = begin_; block < end_; ++block) {
      const char* a = static_cast<const char*>(rows_.data) + blocks_.offset(block, step / kTileDepth);
      int64_t row = 0;
      for (int tile = 0; tile < 2; ++tile) {
        const int64_t height = tile == 0 ? blocks_.first : blocks_.second;
        const int64_t live = std::min(height, blocks_.live(block) - row);
        if (live <= 0) continue;
        configure_tiles(static_cast<int>(height), static_cast<int>(height), static_cast<int>(layout.steps));
        for (int v = 0; v < kVecs; ++v) {
          for (int64_t at = 0; at < part; at += 64) __builtin_prefetch(next + at, 0, 2);
          if (part > 0) next += part;
          slice.weights = decoded_ + weights_at + v * kVecBytes;
          slice.scales = scales_ + v * kLanes;
          slice.offsets = panel_.scales.has_offsets ? offsets_ + v * kLanes : nullptr;
          multiply_tile(a + step % kTileDepth * 4 + row * kTileBytes, static_cast<int>(height), static_cast<int>(live),
                        slice, block * blocks_.height + row, v, place(block, tile));
        }
        row += height;
      }
    }
  }

  void multiply_tile(const char* a, int height, int live, const StoredSlice& slice, int64_t row, int v,
                     float* total) const {
    constexpr int kRoundedTo = 4;  // so that there are few numbers of rows to compile
    const int64_t groups = panel_.layout.groups;
    const float* group_sums = reinterpret_cast<const float*>(rows_.sums) + row * groups;
    float* const part = total + kTileFloats + v * kTileHeight * kTileWidth;
    with_count<kTileHeight / kRoundedTo>((height + kRoundedTo - 1) / kRoundedTo, [&](auto number) {
      multiply_stored(std::make_integer_sequence<int, number * kRoundedTo>{}, a, blocks_.height * kTileBytes, live,
                      slice, group_sums, groups, total + v * kLanes, part);
    });
  }

  void read_scales(const StoredSlice& slice) const {
    for (int64_t g = 0; g < slice.groups; ++g) {
      const char* const header = panel_.header(slice.first + g);
      const char* const span = panel_.span(slice.first + g);
      for (int v = 0; v < kVecs; ++v) {
        const Vec scale = panel_.scales.scale(header, span, v);
        vstore(scales_ + g * kPanelRows + v * kLanes, scale);
        if (!panel_.scales.has_offsets) continue;
        vstore(offsets_ + g * kPanelRows + v * kLanes, panel_.scales.offset(header, span, v, scale));
      }
    }
  }

  const StoredPanel panel_;
  const typename Kind::Codes codes_;
  const Rows& rows_;
  const TileBlocks& blocks_;
  const int64_t begin_, end_;
  float* const sums_;
  float* const scales_;
  float* const offsets_;
  char* const decoded_;
};

// As gemm_worker; `scratch` has stored_tiles_bytes.
template <typename Kind>
void gemm_stored_tiles(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  const int64_t num_panels = panel_count(w);
  const TileBlocks blocks(rows.m, w.k / Kind::kValuesPerStep);
  const Chunks chunks(blocks.count, num_panels, pieces.workers());
  const TilesInUse tiles;
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, num_panels * chunks.count, 1, &piece)) {
    const int64_t panel = piece.begin % num_panels, chunk = piece.begin / num_panels;
    const int64_t begin = chunks.begin(chunk), end = chunks.begin(chunk + 1);
    const StoredTiles<Kind> work(w, rows, blocks, begin, end, panel, scratch);
    const Cold cold = first_of(1, piece.begin == fetched, pieces.fetch());
    work.multiply(cold, piece.next < 0 ? nullptr : panel_at(w, piece.next % num_panels));
    for (int64_t block = begin; block < end; ++block) {
      const int64_t row = block * blocks.height, live = blocks.live(block);
      const int64_t upper = std::min(live, blocks.first);
      finish_tile<Kind>(w, rows, out, row, upper, panel, work.totals(block, 0));
      if (live > upper) finish_tile<Kind>(w, rows, out, row + upper, live - upper, panel, work.totals(block, 1));
    }
    fetched = piece.next;
  }
}

}  // namespace quire

#endif
