// Products of weights in groups with scales of their own, through the tile registers (simd/tiles.h): those compute a
// group's sums, ordinary registers turn these into floats, scale them and add them to those of the groups before.
//
// A slice of a panel is widened to bytes once and kept for all rows. Promises: the bits of the kind's own `tile`: sums
// within a group are integers, and what follows is done in the same order.
// Must not know: how rows were prepared, how groups are packed.
#pragma once

#include "simd/simd.h"

#if defined(QUIRE_AMX)

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_prefetch.h"
#include "gemm/gemm_rows.h"
#include "gemm/gemm_tiles.h"
#include "simd/prefetch.h"
#include "simd/unroll.h"
#include "weights/int4_weights.h"

namespace quire {

// Groups of a slice at most: 16 rows of them, 16 lanes of widened weights and the sums under way are 38 KiB and stay in
// the first-level cache while the other lanes follow.
constexpr int64_t kGroupSlice = 32;
constexpr int64_t kSlabGroups = kTileBytes / kGroup;

// Slices of whole slabs, nearly equal: each brings from memory as much as the next one takes.
inline int64_t group_slice(const Linear& w) {
  const int64_t groups = w.k / kGroup, slices = (groups + kGroupSlice - 1) / kGroupSlice;
  return (groups + slices * kSlabGroups - 1) / (slices * kSlabGroups) * kSlabGroups;
}

// Sums of a chunk's rows by tiles, of which every one has room for the largest; then a slice of widened weights.
template <typename Kind>
int64_t group_sums_bytes(const Linear& w, int64_t m) {
  const TileBlocks blocks(m, w.k / Kind::kValuesPerStep);
  return std::min(blocks.count, kChunkBlocks) * 2 * kTileHeight * kSumsStride;
}
template <typename Kind>
int64_t group_tiles_bytes(const Linear& w, int64_t m) {
  return group_sums_bytes<Kind>(w, m) + group_slice(w) * kVecs * static_cast<int64_t>(sizeof(WideGroup));
}

// Sums of the groups in turns, so that the tiles are at work on some while those before are turned into floats.
constexpr int kTurns = 4, kEarly = 2;
static_assert(kTurns % kSlabGroups == 0, "a turn has its place in a slab");

// The sums of a group in the tile of its turn, and from there to `part`. `a`: its slab of activations.
template <int kTurn>
inline void sum_group_in(const char* a, const WideGroup& group, int32_t (*part)[kTileWidth]) {
  constexpr int kA = 4 + kTurn % 2, kB = 6 + kTurn % 2;
  tile_load<kA>(a + kTurn % kSlabGroups * kGroup, kTileBytes);
  tile_load<kB>(group.steps, sizeof(group.steps[0]));
  tile_zero<kTurn>();
  tile_dot_s8<kTurn, kA, kB>();
  tile_store<kTurn>(part, sizeof(part[0]));
}
inline void sum_group(int64_t turn, const char* a, const WideGroup& group, int32_t (*part)[kTileWidth]) {
  switch (turn) {
    case 0: return sum_group_in<0>(a, group, part);
    case 1: return sum_group_in<1>(a, group, part);
    case 2: return sum_group_in<2>(a, group, part);
    default: return sum_group_in<3>(a, group, part);
  }
}

// `count` groups of `rows` activation rows against 16 lanes of a panel. `a` is their part of slabs that are
// `slab_bytes` apart; sums are [rows][64], and carried in `sums` when `resume`. The rows kRow, `rows` or a few more,
// are turned into floats. Their sums are in registers only because nothing takes their address, for the tiles'
// instructions might touch what is in memory: so no loop over them, and no function of them.
template <int... kRow>
[[gnu::noinline]] void multiply_groups(std::integer_sequence<int, kRow...>, const char* a, int64_t slab_bytes, int rows,
                                       const WideGroup* groups, int64_t count, float* sums, bool resume,
                                       const Ahead& ahead) {
  constexpr int kRows = sizeof...(kRow);
  alignas(64) int32_t parts[kTurns][kRows][kTileWidth];
  for (auto& part : parts) {
    for (int row = rows; row < kRows; ++row) istore(part[row], izero());
  }
  Vec acc[kRows] = {(resume ? vload(sums + kRow * kPanelRows) : vzero())...};
  for (int64_t g = -kEarly; g < count; ++g) {
    const int64_t early = g + kEarly, turn = early % kTurns;
    if (early < count) sum_group(turn, a + early / kSlabGroups * slab_bytes, groups[early], parts[turn]);
    if (g < 0) continue;
    const char* bring = ahead.at + g * ahead.per_step;
    for (int64_t line = 0; line < ahead.lines; ++line) __builtin_prefetch(bring + line * 64, 0, 2);
    const Vec scale = vload(groups[g].scales);
    const auto& part = parts[g % kTurns];
    ((acc[kRow] = vfma(to_vec(iload(part[kRow])), scale, acc[kRow])), ...);
  }
  (vstore(sums + kRow * kPanelRows, acc[kRow]), ...);
}

// `count` groups of a panel from `from` on, as [vectors of lanes][count]; `follows`: what will be read next.
template <typename Kind>
void widen_groups(const char* from, int64_t count, WideGroup* out, Cold cold, const char* follows) {
  constexpr int64_t kBytes = Kind::kGroupBytes, kDistance = kPrefetchBytes / kBytes;
  for (int64_t g = 0; g < count; ++g) {
    const int64_t next = g + kDistance;
    prefetch<kBytes>(cold, next < count ? from + next * kBytes : follows + (next - count) * kBytes);
    for (int v = 0; v < kVecs; ++v) Kind::widen(from + g * kBytes, v, out + v * count + g);
  }
}

// One tile of rows, as above, against all lanes of a slice. `ahead()`: what the next pass over it fetches.
template <typename Next>
void multiply_slice(const char* a, int64_t slab_bytes, int rows, const WideGroup* wide, int64_t count, float* sums,
                    bool resume, const Next& ahead) {
  constexpr int kRoundedTo = 4;  // so that there are few numbers of rows to compile
  configure_tiles(rows, rows, kGroup / 4);
  with_count<kTileHeight / kRoundedTo>((rows + kRoundedTo - 1) / kRoundedTo, [&](auto number) {
    for (int v = 0; v < kVecs; ++v) {
      multiply_groups(std::make_integer_sequence<int, number * kRoundedTo>{}, a, slab_bytes, rows, wide + v * count,
                      count, sums + v * kLanes, resume, ahead());
    }
  });
}

// As gemm_worker; `scratch` has group_tiles_bytes.
template <typename Kind>
void gemm_group_tiles(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  const int64_t num_panels = panel_count(w), groups = w.k / kGroup, slice = group_slice(w);
  const TileBlocks blocks(rows.m, w.k / Kind::kValuesPerStep);
  const Chunks chunks(blocks.count, num_panels, pieces.workers());
  const int64_t heights[2] = {blocks.first, blocks.second};
  const int64_t block_passes = (blocks.second > 0 ? 2 : 1) * kVecs;  // more than the few of Prefetcher
  auto* const wide = reinterpret_cast<WideGroup*>(scratch + group_sums_bytes<Kind>(w, rows.m));
  const TilesInUse in_use;
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, num_panels * chunks.count, 1, &piece)) {
    const int64_t panel = piece.begin % num_panels, chunk = piece.begin / num_panels;
    const int64_t begin = chunks.begin(chunk), end = chunks.begin(chunk + 1);
    const Prefetcher prefetcher((end - begin) * block_passes, Kind::kGroupBytes, kStepBytes);
    prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    for (int64_t group = 0; group < groups; group += slice) {
      const int64_t count = std::min(slice, groups - group);
      const bool last = group + count == groups, ends = last && piece.next < 0;
      const char* from = panel_at(w, panel) + group * Kind::kGroupBytes;
      // With nothing known to follow, what is in the cache.
      const char* after = ends ? from : last ? panel_at(w, piece.next % num_panels) : from + count * Kind::kGroupBytes;
      const bool brought = group > 0 || piece.begin == fetched;  // by the passes over the slice before
      widen_groups<Kind>(from, count, wide, brought ? Cold::kNo : read_once(pieces.fetch()), after);
      int64_t passes = 0;
      const auto ahead = [&] { return prefetcher.of(passes++, count, after, ends); };
      float* sums = reinterpret_cast<float*>(scratch);
      for (int64_t block = begin; block < end; ++block) {
        const char* a = static_cast<const char*>(rows.data) + blocks.offset(block, group / kSlabGroups);
        int64_t row = 0;
        for (const int64_t height : heights) {
          const int64_t live = std::min(height, blocks.live(block) - row);
          if (live <= 0) continue;
          multiply_slice(a + row * kTileBytes, blocks.height * kTileBytes, static_cast<int>(height), wide, count, sums,
                         group > 0, ahead);
          if (last) finish_tile<Kind>(w, rows, out, block * blocks.height + row, live, panel, sums);
          sums += kTileHeight * kPanelRows;
          row += height;
        }
      }
    }
    fetched = piece.next;
  }
}

}  // namespace quire

#endif
