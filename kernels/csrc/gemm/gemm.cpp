#include "gemm/gemm.h"

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_group_tiles.h"
#include "gemm/gemm_partition.h"
#include "gemm/gemm_prefetch.h"
#include "gemm/gemm_stored.h"
#include "gemm/gemm_stored_tiles.h"
#include "gemm/gemm_tile.h"
#include "gemm/gemm_tiles.h"
#include "weights/coded.h"
#include "weights/kinds.h"

namespace quire {
namespace {

// k is cut so that a panel's slice stays in the second-level cache while the activation rows pass by; where a tile
// takes several passes, so that its rows stay in the first-level cache from pass to pass.
constexpr int64_t kSliceBytes = (pass_vecs(kTileRows) == kVecs ? 512 : 64) * 1024;

// So many tiles, 48 rows on a machine with 32 registers, take longer than reading a panel once more.
constexpr int64_t kGroupTiles = 8;

// Over a panel, of the tiles [first, end); `vecs` tells how many vectors a pass of so many rows takes.
int64_t count_passes(const Tiling& tiling, int64_t first, int64_t end, int (*vecs)(int rows)) {
  const int base = static_cast<int>(tiling.base);
  const int64_t larger = std::clamp<int64_t>(tiling.larger - first, 0, end - first);
  return larger * (kVecs / vecs(base + 1)) + (end - first - larger) * (kVecs / vecs(base));
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

// Whether decoded weights are kept for `tiles` tiles.
bool keeps_decoded(const Tiling& tiling, int64_t tiles) {
  return tiles > kDecodingTiles || tiling.rows(0) > kDecodingRows;
}

// Reads coded steps and writes their weights to `out` [count][64] pairs.
class KeptSteps {
 public:
  [[maybe_unused]] static constexpr int64_t kBytes = CodedSteps::kBytes;
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

// `count` steps of a panel to `out`; `follows`: what will be read next. For kDecodesBefore.
[[maybe_unused]] void decode(CodedSteps steps, int64_t count, char* out, Cold cold, const char* follows) {
  KeptSteps kept(steps, out);
  const int64_t turn = count - kPrefetchBytes / CodedSteps::kBytes;
  for (int64_t step = 0; step < count; ++step) {
    const char* next = step < turn ? kept.at() + kPrefetchBytes : follows + (step - turn) * CodedSteps::kBytes;
    prefetch<CodedSteps::kBytes>(cold, next);
    Pairs weights[kVecs];
    kept.next(weights);
  }
}

// Where a piece's tiles find a panel's weights: as they lie, or decoded from the layout of coded.h by every tile, by
// the first one for all, or before any. `decoded`: memory for a slice of them.
template <typename Kind>
class PanelSource {
 public:
  PanelSource(const Linear& w, int64_t panel, bool keeps, char* decoded)
      : start_(panel_at(w, panel)), decoded_(decoded), from_(place(w, panel, keeps)) {}

  int64_t step_bytes() const { return from_ == From::kPlain ? kStepBytes : kCodedStepBytes; }

  // Where a step lies.
  const char* at(int64_t step) const {
    if constexpr (Kind::kMayBeCoded) {
      if (from_ != From::kPlain) return CodedSteps(start_, step).at();
    }
    return start_ + step * kStepBytes;
  }

  // Before the tiles of the `count` steps from `step` on, which `follows` follows. How cold the first tile finds them.
  Cold open(int64_t step, int64_t count, Cold cold, const char* follows) const {
    if constexpr (Kind::kMayBeCoded && kDecodesBefore) {
      if (from_ == From::kDecodedBefore) {
        decode(CodedSteps(start_, step), count, decoded_, cold, follows);
        return Cold::kNo;
      }
    }
    return cold;
  }

  // Calls multiply(most, steps): what reads the weights from `step` on for a tile, which has up to `most` rows.
  // `first`: it is the piece's first one.
  template <typename F>
  void steps_of(bool first, int64_t step, const F& multiply) const {
    if (const char* plain = plain_at(first, step)) {
      return multiply(std::integral_constant<int, kTileRows>{}, PlainSteps<Kind>(plain));
    }
    if constexpr (Kind::kMayBeCoded) {
      const CodedSteps coded(start_, step);
      if constexpr (!kDecodesBefore) {
        if (from_ == From::kDecodedByFirst) {
          return multiply(std::integral_constant<int, kTileRows>{}, KeptSteps(coded, decoded_));
        }
      }
      multiply(std::integral_constant<int, kDecodingRows>{}, coded);
    }
  }

 private:
  enum class From { kPlain, kDecodedByEvery, kDecodedByFirst, kDecodedBefore };

  static From place(const Linear& w, int64_t panel, bool keeps) {
    if constexpr (Kind::kMayBeCoded) {
      if (Kind::is_coded(w, panel)) {
        if (!keeps) return From::kDecodedByEvery;
        return kDecodesBefore ? From::kDecodedBefore : From::kDecodedByFirst;
      }
    }
    return From::kPlain;
  }

  // The weights that a tile needs not decode; null: it must.
  const char* plain_at(bool first, int64_t step) const {
    switch (from_) {
      case From::kPlain: return start_ + step * kStepBytes;
      case From::kDecodedByEvery: return nullptr;
      case From::kDecodedByFirst: return first ? nullptr : decoded_;
      default: return decoded_;
    }
  }

  const char* start_;
  char* decoded_;
  From from_;
};

// What adapters add to the panel that follows; nothing where none is known.
Beside needed_beside(const Output& out, int64_t next_panel) {
  if (out.expander == nullptr || next_panel < 0) return {};
  return out.expander->needed(out.first_panel + next_panel);
}

// Kinds whose products are steps alike, in slices of k.
template <typename Kind>
void gemm_stepped(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, float* partial,
                  char* decoded) {
  const int64_t steps = w.k / Kind::kValuesPerStep;
  const Placing<Kind::kParts> placing(rows.m, steps, kMostRows<Kind>);
  const bool whole = steps <= kSlice;
  const Partition partition(panel_count(w), placing.count, kGroupTiles, pieces.workers());
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, partition.pieces(), 1, &piece)) {
    const int64_t panel = partition.panel(piece.begin), next_panel = partition.next_panel(piece);
    const int64_t first_tile = partition.first_tile(piece.begin), end_tile = partition.end_tile(piece.begin);
    const int64_t num_passes = count_passes(placing, first_tile, end_tile, pass_vecs);
    const PanelSource<Kind> source(w, panel, keeps_decoded(placing, end_tile - first_tile), decoded);
    const Prefetcher prefetcher(num_passes, source.step_bytes(), kStepBytes / 4, needed_beside(out, next_panel));
    const Cold cold = first_of(num_passes, panel == fetched, pieces.fetch());
    if (w.scales != nullptr) prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    if (w.sums != nullptr) prefetch<kPanelRows * 4>(w.sums + panel * kPanelRows);
    for (int64_t step = 0; step < steps; step += kSlice) {
      const int64_t count = std::min(kSlice, steps - step);
      const bool last_slice = step + count == steps;
      const char* from = source.at(step);
      // With nothing known to follow, the start of this panel, which is in the cache.
      const bool ends = last_slice && next_panel < 0;
      const char* after = ends ? from : last_slice ? panel_at(w, next_panel) : from + count * source.step_bytes();
      const Cold first = source.open(step, count, cold, after);
      int64_t passes = 0;
      for (int64_t t = first_tile; t < end_tile; ++t) {
        const bool leads = t == first_tile;
        const int64_t m = placing.first(t), live = placing.rows(t);
        float* sums = partial + (whole ? 0 : m * kPanelRows);
        const char* a = static_cast<const char*>(rows.data) + placing.offset(t, step);
        const auto ahead = [&] { return prefetcher.of(passes++, count, after, ends); };
        source.steps_of(leads, step, [&](auto most, const auto& weights) {
          any_tile<Kind, most>(live, a, placing, weights, count, sums, step > 0, leads ? first : Cold::kNo, ahead);
        });
        if (last_slice) finish_tile<Kind>(w, rows, out, m, live, panel, sums);
      }
    }
    fetched = next_panel < 0 ? panel : prefetcher.all ? next_panel : -1;
  }
}

// Kinds whose products are groups with scales of their own: tiles walk through all of k.
template <typename Kind>
void gemm_grouped(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, float* sums) {
  const int64_t groups = w.k / kGroup;
  const Tiling tiling(rows.m, Kind::kTileRows);
  const Partition partition(panel_count(w), tiling.count, kGroupTiles, pieces.workers());
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, partition.pieces(), 1, &piece)) {
    const int64_t panel = partition.panel(piece.begin), next_panel = partition.next_panel(piece);
    const int64_t first_tile = partition.first_tile(piece.begin), end_tile = partition.end_tile(piece.begin);
    const int64_t num_passes = count_passes(tiling, first_tile, end_tile, Kind::pass_vecs);
    const Prefetcher prefetcher(num_passes, Kind::kGroupBytes, kStepBytes);
    const Cold cold = first_of(num_passes, panel == fetched, pieces.fetch());
    const bool ends = next_panel < 0;
    const char* at = panel_at(w, panel);
    const char* after = panel_at(w, ends ? panel : next_panel);
    prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    int64_t passes = 0;
    for (int64_t t = first_tile; t < end_tile; ++t) {
      const int64_t m = tiling.first(t), live = tiling.rows(t);
      const int8_t* a = static_cast<const int8_t*>(rows.data) + m * w.k;
      const int32_t* group_sums = rows.sums + m * groups;
      with_count<Kind::kTileRows>(static_cast<int>(live), [&](auto number) {
        constexpr int kWide = Kind::pass_vecs(number);
        for (int pass = 0; pass < kVecs / kWide; ++pass) {
          const Cold waits = passes == 0 ? cold : Cold::kNo;
          const Ahead ahead = prefetcher.of(passes++, groups, after, ends);
          Kind::template tile<number, kWide>(a, w.k, group_sums, at, pass * kWide * kLanes, sums, waits, ahead);
        }
      });
      finish_tile<Kind>(w, rows, out, m, live, panel, sums);
    }
    fetched = ends ? panel : prefetcher.all ? next_panel : -1;
  }
}

template <typename Kind>
int64_t sums_bytes(const Linear& w, int64_t m) {
  const bool whole = Kind::kGrouped || w.k / Kind::kValuesPerStep <= kSlice;
  return (whole ? kTileRows : m) * kPanelRows * static_cast<int64_t>(sizeof(float));
}

template <typename Kind>
int64_t decoded_bytes(const Linear& w, int64_t m) {
  const Tiling tiling(m, kTileRows);
  if (!Kind::kMayBeCoded || !keeps_decoded(tiling, tiling.count)) return 0;
  return std::min(kSliceBytes, w.k / Kind::kValuesPerStep * kStepBytes);
}

}  // namespace

int64_t gemm_scratch_bytes(const Linear& w, int64_t m) {
  if (w.kind == WeightKind::kStacked) {
    int64_t most = 0;
    for (int64_t part = 0; part < w.num_parts; ++part) most = std::max(most, gemm_scratch_bytes(w.parts[part], m));
    return most;
  }
  return with_kind(w.kind, [&](auto kind) {
    using Kind = decltype(kind);
#if defined(QUIRE_AMX)
    if (takes_tiles<Kind>(w, m)) {
      if constexpr (Kind::kStored) {
        return stored_tiles_bytes(w, m);
      } else if constexpr (Kind::kGrouped) {
        return group_tiles_bytes<Kind>(w, m);
      } else {
        return tiled_bytes<Kind>(w, m);
      }
    }
#endif
    if constexpr (Kind::kStored) return stored_bytes(m);
    return sums_bytes<Kind>(w, m) + decoded_bytes<Kind>(w, m);
  });
}

void gemm_worker(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  with_kind(w.kind, [&](auto kind) {
    using Kind = decltype(kind);
#if defined(QUIRE_AMX)
    [[maybe_unused]] const FloatsOf<Kind> floats{};
    if (takes_tiles<Kind>(w, rows.m)) {
      if constexpr (Kind::kStored) {
        return gemm_stored_tiles<Kind>(pieces, worker, w, rows, out, scratch);
      } else if constexpr (Kind::kGrouped) {
        return gemm_group_tiles<Kind>(pieces, worker, w, rows, out, scratch);
      } else {
        return gemm_tiled<Kind>(pieces, worker, w, rows, out, scratch);
      }
    }
#endif
    float* sums = reinterpret_cast<float*>(scratch);
    if constexpr (Kind::kStored) {
      gemm_stored<Kind>(pieces, worker, w, rows, out, scratch, kGroupTiles);
    } else if constexpr (Kind::kGrouped) {
      gemm_grouped<Kind>(pieces, worker, w, rows, out, sums);
    } else {
      gemm_stepped<Kind>(pieces, worker, w, rows, out, sums, scratch + sums_bytes<Kind>(w, rows.m));
    }
  });
}

}  // namespace quire
