#include "gemm/gemm.h"

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_tile.h"

namespace quire {
namespace {

// k is cut so that a panel's slice stays in the second-level cache while the activation rows pass by; where a tile
// takes several passes, so that its rows stay in the first-level cache from pass to pass.
constexpr int64_t kSliceBytes = (pass_vecs(kTileRows) == kVecs ? 512 : 64) * 1024;

// Over a panel, of all tiles; `vecs` tells how many vectors a pass of so many rows takes.
int64_t count_passes(const Tiling& tiling, int (*vecs)(int rows)) {
  const int base = static_cast<int>(tiling.base);
  return tiling.larger * (kVecs / vecs(base + 1)) + (tiling.count - tiling.larger) * (kVecs / vecs(base));
}

// Steps of k that are walked before the next panel slice.
constexpr int64_t kSlice = kSliceBytes / kStepBytes;

// With AVX-512, decoding takes a few of the cycles of a tile's products, fewer than a copy does: every tile decodes for
// itself, and only of more tiles than these the first keeps what it decodes for the others. Without, only a single tile
// of few rows does; for more, the weights are decoded beforehand.
#if defined(QUIRE_AVX512)
constexpr bool kDecodesBefore = false;
constexpr int64_t kDecodingTiles = 5;
constexpr int kDecodingRows = kTileRows;  // of a tile that decodes
#else
constexpr bool kDecodesBefore = true;
constexpr int64_t kDecodingTiles = 1;
constexpr int kDecodingRows = 2;
#endif

// Whether decoded weights are kept for several tiles.
bool keeps_decoded(const Tiling& tiling) { return tiling.count > kDecodingTiles || tiling.rows(0) > kDecodingRows; }

// What each pass over a panel fetches of the panel that follows. Many bring all of it. Of few the first waits for its
// own panel, whose loads are then the best prefetch, and the others bring what they have time for.
class Bringing {
 public:
  // `step_bytes`: of the weights that a pass meets in one turn of its loop; `few_bytes` of them for each of few passes.
  Bringing(int64_t passes, int64_t step_bytes, int64_t few_bytes)
      : all(passes > 3), first_(all ? 0 : 1), per_step_(all ? step_bytes / passes : few_bytes) {}

  // For `count` turns of a pass, `after` them; nothing when the worker's panels end here.
  Ahead of(int64_t pass, int64_t count, const char* after, bool ends) const {
    const int64_t lines = !ends && pass >= first_ ? (per_step_ + 63) / 64 : 0;
    return {after, after + (pass - first_) * count * per_step_, per_step_, lines};
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
  void next(Pairs (&weights)[kVecs], int = 0) {
    steps_.next(weights);
    unrolled<kVecs>([&](auto v) { pstore(reinterpret_cast<bf16*>(out_ + v * sizeof(Pairs)), weights[v]); });
    out_ += kStepBytes;
  }

 private:
  CodedSteps steps_;
  char* out_;
};

// `count` steps of a panel to `out`; `follows`: what will be read next.
void decode(CodedSteps steps, int64_t count, char* out, Cold cold, const char* follows) {
  KeptSteps kept(steps, out);
  const int64_t turn = count - kPrefetchBytes / CodedSteps::kBytes;
  for (int64_t step = 0; step < count; ++step) {
    const char* next = step < turn ? kept.at() + kPrefetchBytes : follows + (step - turn) * CodedSteps::kBytes;
    prefetch<CodedSteps::kBytes>(cold, next);
    Pairs weights[kVecs];
    kept.next(weights);
  }
}

template <typename Dot>
void gemm_stepped(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, float* partial,
                  char* decoded) {
  constexpr bool kMayBeCoded = Dot::kKind == WeightKind::kBf16;
  const int64_t steps = w.k / Dot::kValuesPerStep;
  const Placing<Dot::kParts> placing(rows.m, steps);
  const bool whole = steps <= kSlice;
  const bool keeps = keeps_decoded(placing);
  const int64_t num_panels = panel_count(w);
  const int64_t num_passes = count_passes(placing, pass_vecs);
  const Cold from_memory = num_passes == 1 ? Cold::kOnce : Cold::kShared;
  int64_t fetched = -1;
  Piece piece;
  while (panels.take(worker, num_panels, 1, &piece)) {
    const int64_t panel = piece.begin;
    const char* start = panel_at(w, panel);
    const bool coded = kMayBeCoded && is_coded(w, panel);
    const int64_t step_bytes = coded ? kCodedStepBytes : kStepBytes;
    const Bringing bringing(num_passes, step_bytes, kStepBytes / 4);
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
      const bool before = coded && keeps && kDecodesBefore;
      if constexpr (kMayBeCoded) {
        if (before) decode(CodedSteps(start, step), count, decoded, cold, after);
      }
      int64_t passes = 0;
      for (int64_t t = 0; t < placing.count; ++t) {
        const int64_t m = placing.first(t), live = placing.rows(t);
        float* sums = partial + (whole ? 0 : m * kPanelRows);
        const char* a = static_cast<const char*>(rows.data) + placing.offset(t, step);
        const auto ahead = [&] { return bringing.of(passes++, count, after, ends); };
        const auto multiply = [&](auto most, const auto& weights) {
          const Cold waits = t == 0 && !before ? cold : Cold::kNo;
          any_tile<Dot, most>(live, a, placing, weights, count, sums, step > 0, waits, ahead);
        };
        constexpr std::integral_constant<int, kTileRows> any{};
        if (!coded || before || (keeps && t > 0)) {
          multiply(any, PlainSteps<Dot>(coded ? decoded : from));
        } else if constexpr (kMayBeCoded) {
          const CodedSteps weights(start, step);
          if constexpr (!kDecodesBefore) {
            keeps ? multiply(any, KeptSteps(weights, decoded)) : multiply(any, weights);
          } else {
            multiply(std::integral_constant<int, kDecodingRows>{}, weights);
          }
        }
        if (last_slice) finish_tile<Dot::kKind>(w, rows, out, m, live, panel, sums);
      }
    }
    if (bringing.all) fetched = piece.next;
  }
}

void gemm_int4(Pieces& panels, int worker, const Linear& w, const Rows& rows, const Output& out, float* sums) {
  const int64_t groups = w.k / kGroup, num_panels = panel_count(w);
  const Tiling tiling(rows.m, kInt4Rows);
  const int64_t num_passes = count_passes(tiling, int4_vecs);
  const Bringing bringing(num_passes, kGroupBytes, kStepBytes);
  const Cold from_memory = num_passes == 1 ? Cold::kOnce : Cold::kShared;
  int64_t fetched = -1;
  Piece piece;
  while (panels.take(worker, num_panels, 1, &piece)) {
    const int64_t panel = piece.begin;
    const Cold cold = panel == fetched ? Cold::kNo : from_memory;
    const bool ends = piece.next < 0;
    const char* at = panel_at(w, panel);
    const char* after = panel_at(w, ends ? panel : piece.next);
    prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    int64_t passes = 0;
    for (int64_t t = 0; t < tiling.count; ++t) {
      const int64_t m = tiling.first(t), live = tiling.rows(t);
      const int8_t* a = static_cast<const int8_t*>(rows.data) + m * w.k;
      const int32_t* group_sums = rows.sums + m * groups;
      with_count<kInt4Rows>(static_cast<int>(live), [&](auto number) {
        constexpr int kWide = int4_vecs(number);
        for (int pass = 0; pass < kVecs / kWide; ++pass) {
          const Cold waits = passes == 0 ? cold : Cold::kNo;
          const Ahead ahead = bringing.of(passes++, groups, after, ends);
          tile_int4<number, kWide>(a, w.k, group_sums, at, pass * kWide * kLanes, sums, waits, ahead);
        }
      });
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
  if (w.kind != WeightKind::kBf16 || !keeps_decoded(Tiling(m, kTileRows))) return 0;
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
