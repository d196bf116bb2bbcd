#include "gemm.h"

#include <algorithm>

#include "gemm_finish.h"
#include "gemm_tile.h"

namespace quire {
namespace {

// k is cut so that a panel's slice stays in the second-level cache while the activation rows pass by.
constexpr int64_t kSliceBytes = 512 * 1024;

// Activation rows in as few tiles as possible, as equal as possible: 8 rows are 4 + 4, 32 are 6 + 6 + 5 + 5 + 5 + 5.
struct Tiling {
  Tiling(int64_t m, int64_t limit) : count((m + limit - 1) / limit), base(m / count), larger(m % count) {}
  int64_t first(int64_t tile) const { return tile * base + std::min(tile, larger); }
  int64_t rows(int64_t tile) const { return base + (tile < larger ? 1 : 0); }
  int64_t count, base, larger;
};

// Steps of k that are walked before the next panel slice.
constexpr int64_t kSlice = kSliceBytes / kStepBytes;

// Decoding takes a few of the cycles that a tile's products take, on AVX-512 fewer than a copy does: there only of more
// tiles than these the first keeps what it decodes for the others.
#if defined(QUIRE_AVX512)
constexpr int64_t kDecodingTiles = 5;
#else
constexpr int64_t kDecodingTiles = 1;
#endif

// What each of a panel's tiles fetches of the panel that follows. Many bring all of it. Of few the first waits for its own
// panel, whose loads are then the best prefetch, and the others bring what they have time for.
class Bringing {
 public:
  // `step_bytes`: of the weights that a tile meets in one turn of its loop; `few_bytes` of them for each of few tiles.
  Bringing(int64_t tiles, int64_t step_bytes, int64_t few_bytes)
      : all(tiles > 3), first_(all ? 0 : 1), per_step_(all ? step_bytes / tiles : few_bytes) {}

  // For `count` turns of a tile, `after` them; nothing when the worker's panels end here.
  Ahead of(int64_t tile, int64_t count, const char* after, bool ends) const {
    const int64_t lines = !ends && tile >= first_ ? (per_step_ + 63) / 64 : 0;
    return {after, after + (tile - first_) * count * per_step_, per_step_, lines};
  }

  const bool all;

 private:
  const int64_t first_, per_step_;
};

// Reads coded steps and writes their weights to `out` [count][64] pairs.
class KeptSteps {
 public:
  static constexpr int64_t kBytes = CodedSteps::kBytes;
  KeptSteps(const CodedSteps& steps, char* out) : steps_(steps), out_(out) {}
  const char* at() const { return steps_.at(); }
  void next(Pairs (&weights)[kVecs]) {
    steps_.next(weights);
    unrolled<kVecs>([&](auto v) { pstore(reinterpret_cast<bf16*>(out_ + v * sizeof(Pairs)), weights[v]); });
    out_ += kStepBytes;
  }

 private:
  CodedSteps steps_;
  char* out_;
};

template <typename Dot>
void gemm_stepped(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, float* partial,
                  char* decoded) {
  constexpr bool kMayBeCoded = Dot::kKind == WeightKind::kBf16;
  const int64_t steps = w.k / Dot::kValuesPerStep;
  const Tiling tiling(rows.m, kTileRows);
  const int64_t stride = steps * 4;
  const bool whole = steps <= kSlice;
  const bool keeps = tiling.count > kDecodingTiles;
  const int64_t num_panels = panel_count(w);
  const Cold from_memory = tiling.count == 1 ? Cold::kOnce : Cold::kShared;
  int64_t fetched = -1;
  Piece piece;
  while (panels.take(worker, num_panels, 1, &piece)) {
    const int64_t panel = piece.begin;
    const char* start = panel_at(w, panel);
    const bool coded = kMayBeCoded && is_coded(w, panel);
    const int64_t step_bytes = coded ? kCodedStepBytes : kStepBytes;
    const Bringing bringing(tiling.count, step_bytes, kStepBytes / 4);
    const Cold cold = panel == fetched ? Cold::kNo : from_memory;
    if (w.scales != nullptr) prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    if (w.sums != nullptr) prefetch<kPanelRows * 4>(w.sums + panel * kPanelRows);
    for (int64_t step = 0; step < steps; step += kSlice) {
      const int64_t count = std::min(kSlice, steps - step);
      const bool last_slice = step + count == steps;
      const char* from = coded ? CodedSteps(start, step).at() : start + step * kStepBytes;
      // With nothing known to follow, the start of this panel, which is in the cache.
      const bool ends = last_slice && piece.next < 0;
      const char* after = ends ? from : last_slice ? panel_at(w, piece.next) : from + count * step_bytes;
      for (int64_t t = 0; t < tiling.count; ++t) {
        const int64_t m = tiling.first(t), live = tiling.rows(t);
        float* sums = partial + (whole ? 0 : m * kPanelRows);
        const char* a = static_cast<const char*>(rows.data) + m * stride + step * 4;
        const Ahead ahead = bringing.of(t, count, after, ends);
        const auto multiply = [&](const auto& weights) {
          any_tile<Dot>(live, a, stride, weights, count, sums, step > 0, t == 0 ? cold : Cold::kNo, ahead);
        };
        if (!coded || (keeps && t > 0)) {
          multiply(PlainSteps<Dot>(coded ? decoded : from));
        } else if constexpr (kMayBeCoded) {
          const CodedSteps weights(start, step);
          keeps ? multiply(KeptSteps(weights, decoded)) : multiply(weights);
        }
        if (last_slice) finish_tile<Dot::kKind>(w, rows, out, m, live, panel, sums);
      }
    }
    if (bringing.all) fetched = piece.next;
  }
}

void gemm_int4(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, float* sums) {
  const bool halves = rows.m > kInt4WholeRows;
  const Tiling tiling(rows.m, halves ? kTileRows : kInt4WholeRows);
  const int64_t turns = halves ? 2 : 1;  // of each tile
  const int64_t groups = w.k / kGroup, num_panels = panel_count(w);
  const Bringing bringing(tiling.count * turns, kGroupBytes, kStepBytes);
  const Cold from_memory = tiling.count * turns == 1 ? Cold::kOnce : Cold::kShared;
  int64_t fetched = -1;
  Piece piece;
  while (panels.take(worker, num_panels, 1, &piece)) {
    const int64_t panel = piece.begin;
    const Cold cold = panel == fetched ? Cold::kNo : from_memory;
    const bool ends = piece.next < 0;
    const char* at = panel_at(w, panel);
    const char* after = panel_at(w, ends ? panel : piece.next);
    prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    for (int64_t t = 0; t < tiling.count; ++t) {
      const int64_t m = tiling.first(t), live = tiling.rows(t);
      const int8_t* a = static_cast<const int8_t*>(rows.data) + m * w.k;
      const int32_t* group_sums = rows.sums + m * groups;
      for (int64_t turn = 0; turn < turns; ++turn) {
        const Ahead ahead = bringing.of(t * turns + turn, groups, after, ends);
        const Cold waits = t == 0 && turn == 0 ? cold : Cold::kNo;
        if (halves) {
          with_count<kTileRows>(static_cast<int>(live), [&](auto number) {
            tile_int4<number, kVecs / 2>(a, w.k, group_sums, at, turn * kPanelRows / 2, sums, waits, ahead);
          });
        } else {
          with_count<kInt4WholeRows>(static_cast<int>(live), [&](auto number) {
            tile_int4<number, kVecs>(a, w.k, group_sums, at, 0, sums, waits, ahead);
          });
        }
      }
      finish_tile<WeightKind::kInt4>(w, rows, out, m, live, panel, sums);
    }
    if (bringing.all) fetched = piece.next;
  }
}

int64_t sums_bytes(const Linear& w, int64_t m) {
  const int64_t steps = w.kind == WeightKind::kBf16 ? w.k / Bf16Dot::kValuesPerStep : w.k / Int8Dot::kValuesPerStep;
  const bool whole = w.kind == WeightKind::kInt4 || steps <= kSlice;
  return (whole ? kTileRows : m) * kPanelRows * static_cast<int64_t>(sizeof(float));
}

int64_t decoded_bytes(const Linear& w, int64_t m) {
  if (w.kind != WeightKind::kBf16 || Tiling(m, kTileRows).count <= kDecodingTiles) return 0;
  return std::min(kSliceBytes, w.k / Bf16Dot::kValuesPerStep * kStepBytes);
}

}  // namespace

int64_t gemm_scratch_bytes(const Linear& w, int64_t m) { return sums_bytes(w, m) + decoded_bytes(w, m); }

void gemm_worker(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  float* sums = reinterpret_cast<float*>(scratch);
  char* decoded = scratch + sums_bytes(w, rows.m);
  switch (w.kind) {
    case WeightKind::kBf16: return gemm_stepped<Bf16Dot>(panels, worker, w, rows, out, sums, decoded);
    case WeightKind::kInt8: return gemm_stepped<Int8Dot>(panels, worker, w, rows, out, sums, decoded);
    default: return gemm_int4(panels, worker, w, rows, out, sums);
  }
}

}  // namespace quire
