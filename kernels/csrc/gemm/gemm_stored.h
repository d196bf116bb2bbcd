// Products of weights as others quantised them (stored.h): some activation rows against a panel, group by group.
//
// A group's products are one sum that walks k in order, or where there are tile registers the sums that those have,
// whatever the number of rows; groups are added in order. Weights are decoded by every tile of rows, or for many once,
// into a slice of pairs of bf16. Must not know: how rows were prepared.
#pragma once

#include <algorithm>

#include "gemm/gemm_finish.h"
#include "gemm/gemm_partition.h"
#include "gemm/gemm_prefetch.h"
#include "gemm/gemm_rows.h"
#include "gemm/gemm_tile.h"
#include "simd/prefetch.h"
#include "simd/unroll.h"
#include "weights/stored.h"
#include "weights/stored_codes.h"

namespace quire {

// One panel's part in a product.
struct StoredPanel {
  StoredPanel(const Linear& w, int code_bits, int64_t panel)
      : layout(w, code_bits), scales(w, layout), start(panel_at(w, panel)), end(panel_at(w, panel + 1)) {}

  // A group's header, and that of its span.
  const char* header(int64_t g) const { return start + layout.header_at(g); }
  const char* span(int64_t g) const { return start + layout.span_at(g); }

  const StoredLayout layout;
  const StoredScales scales;
  const char* start;
  const char* end;
};

// Sums under way, [rows][64] each: of the groups that are complete, and of the one that is not.
struct StoredSums {
  float* total;
  float* part;
};

// Adds a group's part, of `kRows` rows and the vectors from `first` on. `sums`: the activations', `stride` a row.
template <int kRows, int kWide>
inline void add_group(const StoredPanel& panel, int64_t g, int first, const Vec (&part)[kRows][kWide],
                      const float* sums, int64_t stride, float* total) {
  const char* const header = panel.header(g);
  const char* const span = panel.span(g);
  for (int v = 0; v < kWide; ++v) {
    float* const to = total + (first + v) * kLanes;
    const Vec scale = panel.scales.scale(header, span, first + v);
    if (!panel.scales.has_offsets) {
      for (int r = 0; r < kRows; ++r) vstore(to + r * kPanelRows, vfma(part[r][v], scale, vload(to + r * kPanelRows)));
      continue;
    }
    const Vec offset = panel.scales.offset(header, span, first + v, scale);
    for (int r = 0; r < kRows; ++r) {
      const Vec scaled = vfma(part[r][v], scale, vload(to + r * kPanelRows));
      vstore(to + r * kPanelRows, vfma(offset, vset(sums[r * stride + g]), scaled));
    }
  }
}

// The products of one step, as `tile` of gemm_tile.h has them.
template <typename Kind, int kRows, int kWide>
QUIRE_BLOCK inline void add_step(Vec (&part)[kRows][kWide], const Pairs (&weights)[kWide], const char* a,
                                 const Placing<Kind::kParts>& placing, int64_t step) {
  const auto factor = [&](auto p, auto r) { return Kind::factor(a + placing.template step_offset<kRows>(step, p, r)); };
  if constexpr (Kind::kParts > 1 && kWide > 1 && kRegisters < 32) {
    unrolled<kWide>([&](auto v) {
      unrolled<Kind::kParts>([&](auto p) {
        const typename Kind::Part w = Kind::template part<p>(weights[v]);
        unrolled<kRows>([&](auto r) { part[r][v] = Kind::dot(part[r][v], w, factor(p, r)); });
      });
    });
  } else {
    unrolled<Kind::kParts>([&](auto p) {
      typename Kind::Part w[kWide];
      unrolled<kWide>([&](auto v) { w[v] = Kind::template part<p>(weights[v]); });
      unrolled<kRows>([&](auto r) {
        const typename Kind::Part x = factor(p, r);
        unrolled<kWide>([&](auto v) { part[r][v] = Kind::dot(part[r][v], w[v], x); });
      });
    });
  }
}

#if defined(QUIRE_AMX)
// As `chained_tile` of gemm_chains.h has them: sums of the pairs' first values and of the second ones.
template <int kRows, int kWide>
inline void add_chained(Vec (&chains)[2][kRows][kWide], const Pairs (&weights)[kWide], const char* a,
                        const Placing<1>& placing, int64_t step) {
  unrolled<2>([&](auto p) {
    Vec x[kRows];
    unrolled<kRows>([&](auto r) {
      x[r] = pair_values<p>(pset(reinterpret_cast<const bf16*>(a + placing.template step_offset<kRows>(step, 0, r))));
    });
    unrolled<kWide>([&](auto v) {
      const Vec w = pair_values<p>(weights[v]);
      unrolled<kRows>([&](auto r) { chains[p][r][v] = fused(chains[p][r][v], w, x[r]); });
    });
  });
}
#endif

// The blocks [begin, end) of a panel against `kRows` activation rows, whose steps from `begin` on are at `a`, and the
// kWide vectors from `first` on. `codes` reads the weights, which are in `decoded` or, if that is null, in the panel.
// Sums are carried from call to call. `group_sums`: the activations', of the first row.
template <typename Kind, typename Codes, int kRows, int kWide>
[[gnu::flatten]] void stored_tile(const StoredPanel& panel, const Codes& codes, const char* decoded, int64_t begin,
                                  int64_t end, const char* a, const Placing<Kind::kParts>& placing, int first,
                                  const float* group_sums, const StoredSums& sums, Cold cold, const Ahead& ahead) {
  const StoredLayout& layout = panel.layout;
  Vec part[kRows][kWide];
  int64_t g = begin / layout.group, in_group = begin % layout.group;
  unrolled<kRows>([&](auto r) {
    unrolled<kWide>([&](auto v) {
      const int64_t at = (r * kVecs + first + v) * kLanes;
      part[r][v] = in_group > 0 ? vload(sums.part + at) : vzero();
      if (begin == 0) vstore(sums.total + at, vzero());
    });
  });
  const char* at = decoded != nullptr ? decoded : panel.start + layout.block_at(begin);
  const int64_t loads = layout.steps / Codes::kSteps;
  int64_t step = 0;
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t line = 0; line < ahead.lines; ++line) {
      __builtin_prefetch(ahead.at + (block - begin) * ahead.per_step + line * 64, 0, 2);
    }
#if defined(QUIRE_AMX)
    Vec chains[2][kRows][kWide];
    unrolled<2>(
        [&](auto p) { unrolled<kRows>([&](auto r) { unrolled<kWide>([&](auto v) { chains[p][r][v] = vzero(); }); }); });
#endif
    for (int64_t load = 0; load < loads; ++load, at += Codes::kLoadBytes) {
      if (cold != Cold::kNo) {
        const char* next = at + kPrefetchBytes;
        prefetch<Codes::kLoadBytes>(cold, next < panel.end ? next : ahead.follows + (next - panel.end));
      }
      typename Codes::Load words[kWide];
      unrolled<kWide>([&](auto v) { words[v] = Codes::load(at + (first + v) * kLanes * 4); });
      unrolled<Codes::kSteps>([&](auto s) {
        Pairs weights[kWide];
        unrolled<kWide>([&](auto v) { weights[v] = codes.template pairs<s>(words[v]); });
#if defined(QUIRE_AMX)
        add_chained<kRows, kWide>(chains, weights, a, placing, step + s);
#else
        add_step<Kind, kRows, kWide>(part, weights, a, placing, step + s);
#endif
      });
      step += Codes::kSteps;
    }
#if defined(QUIRE_AMX)
    unrolled<kRows>([&](auto r) {
      unrolled<kWide>([&](auto v) { part[r][v] = vadd(part[r][v], vadd(chains[0][r][v], chains[1][r][v])); });
    });
#endif
    if (++in_group < layout.group && block + 1 < layout.blocks) continue;
    add_group<kRows, kWide>(panel, g, first, part, group_sums, layout.groups, sums.total);
    unrolled<kRows>([&](auto r) { unrolled<kWide>([&](auto v) { part[r][v] = vzero(); }); });
    in_group = 0;
    ++g;
    if (decoded == nullptr && block + 1 < layout.blocks) {
      const char* const codes_at = panel.start + layout.block_at(block + 1);
      if (cold != Cold::kNo) {
        for (; at < codes_at; at += 64) {
          const char* next = at + kPrefetchBytes;
          prefetch<64>(cold, next < panel.end ? next : ahead.follows + (next - panel.end));
        }
      }
      at = codes_at;
    }
  }
  if (in_group == 0) return;
  unrolled<kRows>([&](auto r) {
    unrolled<kWide>([&](auto v) { vstore(sums.part + (r * kVecs + first + v) * kLanes, part[r][v]); });
  });
}

// As above, against all lanes and with up to kTileRows rows. `ahead()`: what the next pass over the panel fetches.
template <typename Kind, typename Codes, typename Next>
void any_stored_tile(int64_t rows, const StoredPanel& panel, const Codes& codes, const char* decoded, int64_t begin,
                     int64_t end, const char* a, const Placing<Kind::kParts>& placing, const float* group_sums,
                     const StoredSums& sums, Cold cold, const Next& ahead) {
  with_count<kMostRows<Kind>>(static_cast<int>(rows), [&](auto number) {
    constexpr int kWide = pass_vecs(number);
    for (int pass = 0; pass < kVecs / kWide; ++pass) {
      stored_tile<Kind, Codes, number, kWide>(panel, codes, decoded, begin, end, a, placing, pass * kWide, group_sums,
                                              sums, pass == 0 ? cold : Cold::kNo, ahead());
    }
  });
}

// The weights of the blocks [begin, end) to `out`: steps `step_bytes` apart, of four vectors of pairs `vec_bytes`
// apart. `follows`: what will be read after the panel.
template <typename Codes>
[[gnu::flatten]] void decode_stored(const StoredPanel& panel, const Codes& codes, int64_t begin, int64_t end, char* out,
                                    int64_t step_bytes, int64_t vec_bytes, Cold cold, const char* follows) {
  const StoredLayout& layout = panel.layout;
  const int64_t loads = layout.steps / Codes::kSteps;
  for (int64_t block = begin; block < end; ++block) {
    const char* at = panel.start + layout.block_at(block);
    for (int64_t load = 0; load < loads; ++load, at += Codes::kLoadBytes) {
      if (cold != Cold::kNo) {
        const char* next = at + kPrefetchBytes;
        prefetch<Codes::kLoadBytes>(cold, next < panel.end ? next : follows + (next - panel.end));
      }
      typename Codes::Load words[kVecs];
      unrolled<kVecs>([&](auto v) { words[v] = Codes::load(at + v * kLanes * 4); });
      unrolled<Codes::kSteps>([&](auto s) {
        unrolled<kVecs>(
            [&](auto v) { pstore(reinterpret_cast<bf16*>(out + v * vec_bytes), codes.template pairs<s>(words[v])); });
        out += step_bytes;
      });
    }
  }
}

// Blocks of a slice that is decoded once for several tiles: it stays in the second-level cache, and where a tile takes
// several passes in the first.
constexpr int64_t kDecodedSliceBytes = (pass_vecs(kTileRows) == kVecs ? 256 : 16) * 1024;
inline int64_t decoded_blocks(const StoredLayout& layout) { return kDecodedSliceBytes / (layout.steps * kStepBytes); }

// Whether weights are decoded once for `tiles` tiles. Decoding takes less than the products of two rows with AVX-512,
// and more than those of a few without.
inline bool decodes_once(const Tiling& tiling, int64_t tiles) {
  return tiles > (kRegisters >= 32 ? 3 : 1) || (kRegisters < 32 && tiling.rows(0) > 2);
}

inline int64_t stored_sums_bytes(int64_t m) {
  return 2 * std::max<int64_t>(m, kTileRows) * kPanelRows * static_cast<int64_t>(sizeof(float));
}
inline int64_t stored_bytes(int64_t m) { return stored_sums_bytes(m) + kDecodedSliceBytes; }

// As gemm_worker; `scratch` has stored_bytes.
template <typename Kind>
void gemm_stored(Deal& pieces, int worker, const Linear& w, const Rows& rows, const Output& out, char* scratch,
                 int64_t least_tiles) {
  using Codes = typename Kind::Codes;
  const int64_t steps = w.k / Kind::kValuesPerStep;
  const Placing<Kind::kParts> placing(rows.m, steps, kMostRows<Kind>);
  const Partition partition(panel_count(w), placing.count, least_tiles, pieces.workers());
  const Codes codes(w);
  char* const decoded = scratch + stored_sums_bytes(rows.m);
  float* const all_sums = reinterpret_cast<float*>(scratch);
  int64_t fetched = -1;
  Piece piece;
  while (pieces.take(worker, partition.pieces(), 1, &piece)) {
    const int64_t index = partition.panel(piece.begin), next_panel = partition.next_panel(piece);
    const int64_t first_tile = partition.first_tile(piece.begin), end_tile = partition.end_tile(piece.begin);
    const StoredPanel panel(w, Codes::kBits, index);
    const StoredLayout& layout = panel.layout;
    const bool once = decodes_once(placing, end_tile - first_tile);
    const int64_t slice = once ? decoded_blocks(layout) : layout.blocks;
    const int64_t passes = once ? 2 : end_tile - first_tile;
    const Cold cold = first_of(passes, index == fetched, pieces.fetch());
    const char* const after = next_panel < 0 ? panel.start : panel_at(w, next_panel);
    const auto ahead = [&] { return Ahead{after, after, 0, 0}; };
    for (int64_t begin = 0; begin < layout.blocks; begin += slice) {
      const int64_t end = std::min(begin + slice, layout.blocks);
      if (once) decode_stored(panel, codes, begin, end, decoded, kStepBytes, kStepBytes / kVecs, cold, after);
      for (int64_t t = first_tile; t < end_tile; ++t) {
        const int64_t m = placing.first(t), live = placing.rows(t);
        const char* a = static_cast<const char*>(rows.data) + placing.offset(t, begin * layout.steps);
        const float* group_sums = reinterpret_cast<const float*>(rows.sums) + m * layout.groups;
        float* const sums = all_sums + (once ? 2 * m * kPanelRows : 0);
        const StoredSums to{sums, sums + live * kPanelRows};
        if (once) {
          any_stored_tile<Kind>(live, panel, DecodedPairs{}, decoded, begin, end, a, placing, group_sums, to, Cold::kNo,
                                ahead);
        } else {
          const Cold found = t == first_tile ? cold : Cold::kNo;
          any_stored_tile<Kind>(live, panel, codes, nullptr, begin, end, a, placing, group_sums, to, found, ahead);
        }
        if (end == layout.blocks) finish_tile<Kind>(w, rows, out, m, live, index, to.total);
      }
    }
    fetched = next_panel < 0 ? index : -1;
  }
}

}  // namespace quire
