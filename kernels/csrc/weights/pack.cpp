// Weights into panels: transposes, quantises, pads with zeros.
//
// Owns the layout that gemm.h describes. Promises: writes every byte of the panels; rows in parallel, each on its own.
// Must not know: files, which layer a matrix is from.
#include <cmath>

#include "gemm/gemm.h"
#include "gemm/norm.h"
#include "ops.h"
#include "runtime/context.h"
#include "weights/encode.h"

namespace quire {
namespace {

struct Source {
  const bf16* rows;   // [n, columns], or the gate of a gate-up pair
  const bf16* above;  // gate-up: the up matrix, else null
};

// The matrix row in a lane of a panel, or null past the last one.
const bf16* source_row(const Linear& w, const Source& from, int64_t panel, int64_t lane) {
  if (!w.gate_up) {
    const int64_t row = panel * kPanelRows + lane;
    return row < w.n ? from.rows + row * w.columns : nullptr;
  }
  constexpr int64_t kHalf = kPanelRows / 2;
  const int64_t row = panel * kHalf + lane % kHalf;
  if (row >= w.n / 2) return nullptr;
  return (lane < kHalf ? from.rows : from.above) + row * w.columns;
}

// rows [64][steps] of four bytes -> out [steps][64]. In blocks, so that the lines being written stay in the cache.
void transpose(const char* rows, int64_t steps, char* out) {
  constexpr int64_t kBlock = 16;
  for (int64_t first = 0; first < steps; first += kBlock) {
    const int64_t last = first + kBlock < steps ? first + kBlock : steps;
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      for (int64_t step = first; step < last; ++step) {
        std::memcpy(out + (step * kPanelRows + lane) * 4, rows + (lane * steps + step) * 4, 4);
      }
    }
  }
}

// A coded panel costs a misprediction for every repair; where there are more it is slower than a plain one.
constexpr int64_t kStepsPerRepair = 8;

// The panel's lowest exponent if it is coded, judged by every fifth weight.
int lowest_exponent(const Linear& w, const Source& from, int64_t panel) {
  constexpr int64_t kSampled = 5;
  ExponentCounts counts;
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    const bf16* row = source_row(w, from, panel, lane);
    if (row == nullptr) continue;
    for (int64_t at = lane % kSampled; at < w.columns; at += kSampled) counts.add(row[at]);
  }
  return counts.lowest();
}

int64_t count_repairs(const Linear& w, const Source& from, int64_t panel, int lowest) {
  int64_t repairs = 0;
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    const bf16* row = source_row(w, from, panel, lane);
    if (row == nullptr) continue;
    int32_t beyond = 0;
    for (int64_t at = 0; at < w.columns; ++at) beyond += within(row[at], lowest) ? 0 : 1;
    repairs += beyond;
  }
  return repairs;
}

int64_t packed_panel_bytes(const Linear& w, const Source& from, int64_t panel) {
  const int64_t plain = plain_panel_bytes(w);
  if (w.kind != WeightKind::kBf16) return plain;
  const int64_t steps = w.k / 2, repairs = count_repairs(w, from, panel, lowest_exponent(w, from, panel));
  return repairs * kStepsPerRepair > steps ? plain : CodedHeader::size(repairs) + steps * kCodedStepBytes;
}

// `stage` has room for two plain panels.
void pack_bf16(const Linear& w, const Source& from, int64_t panel, char* stage, char* out) {
  const bool coded = is_coded(w, panel);
  const int lowest = coded ? lowest_exponent(w, from, panel) : 0;
  // Padding meets activations of zero or yields rows that nobody reads: it takes any finite value that needs no repair.
  const bf16 padding = static_cast<bf16>(lowest << kExponentShift);
  bf16* rows = reinterpret_cast<bf16*>(stage);
  for (int64_t lane = 0; lane < kPanelRows; ++lane, rows += w.k) {
    const bf16* row = source_row(w, from, panel, lane);
    const int64_t columns = row == nullptr ? 0 : w.columns;
    std::copy(row, row + columns, rows);
    std::fill(rows + columns, rows + w.k, padding);
  }
  const int64_t steps = w.k / 2;
  if (!coded) return transpose(stage, steps, out);
  char* weights = stage + plain_panel_bytes(w);
  transpose(stage, steps, weights);
  const auto repairs = static_cast<int32_t>(count_repairs(w, from, panel, lowest));
  encode_panel(reinterpret_cast<const bf16*>(weights), steps, lowest, repairs, out);
}

inline Vec load_row(const bf16* x, int64_t at, int64_t n) {
  bf16 lanes[kLanes] = {};
  if (at < n) std::memcpy(lanes, x + at, static_cast<size_t>(n - at < kLanes ? n - at : kLanes) * sizeof(bf16));
  return vload_bf16(lanes);
}

void pack_int8(const Linear& w, const Source& from, int64_t panel, char* stage, char* out, float* scales,
               int32_t* sums) {
  int8_t* rows = reinterpret_cast<int8_t*>(stage);
  int32_t* group_sums = reinterpret_cast<int32_t*>(stage + kPanelRows * w.k);
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    const bf16* row = source_row(w, from, panel, lane);
    const int64_t at = panel * kPanelRows + lane;
    scales[at] = quantize_row_signed(row, row == nullptr ? 0 : w.columns, w.k, rows + lane * w.k, group_sums);
    sums[at] = 0;
    for (int64_t g = 0; g < w.k / kGroup; ++g) sums[at] += 16 * group_sums[g];  // these are 8 times the sum
  }
  transpose(stage, w.k / 4, out);
}

// Sixteen scales are tried for a group, one per lane: they map its extreme value to -8 and less or more. The first one,
// exactly -8, is the usual choice.
constexpr float kExtremes[kLanes] = {-8.0f, -7.8f, -7.6f, -7.4f, -7.2f, -7.0f, -6.8f, -6.5f,
                                     -8.2f, -8.4f, -8.6f, -8.8f, -9.0f, -9.3f, -9.6f, -10.0f};

inline Vec nibbles(Vec value, Vec inverse) { return vmin(vmax(vround(vmul(value, inverse)), vset(-8.0f)), vset(7.0f)); }

// The code of the scale with the least squared error for 32 finite values, of which the largest is below 13.
uint8_t best_scale(const float* x) {
  float extreme = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  }
  float tried[kLanes];
  vstore(tried, vdiv(vset(extreme), vload(kExtremes)));
  uint8_t codes[kLanes];
  for (int i = 0; i < kLanes; ++i) codes[i] = scale_code(tried[i]);
  const Vec scale = vload_scales(codes);
  const Vec inverse = vdiv(vset(1.0f), scale);
  Vec error = vzero();
  for (int i = 0; i < kGroup; ++i) {
    const Vec value = vset(x[i]);
    const Vec miss = vsub(value, vmul(nibbles(value, inverse), scale));
    error = vfma(miss, miss, error);
  }
  float errors[kLanes];
  vstore(errors, error);
  int best = 0;
  for (int i = 1; i < kLanes; ++i) {
    if (errors[i] < errors[best]) best = i;
  }
  return codes[best];
}

// The power of two that a row's scales are relative to: the largest that is tried for it is then between 1 and 2. NaN
// for a row that is not finite.
float row_unit(const bf16* row, int64_t columns) {
  constexpr float kMost = 1.0f / 6.5f;  // of the extreme value
  constexpr float kLeast = 1e-35f;      // the inverse of its unit is a number
  const float largest = to_float(largest_magnitude(row, columns));
  if (!std::isfinite(largest)) return std::nanf("");
  return std::ldexp(1.0f, std::ilogb(std::max(largest, kLeast) * kMost));
}

void pack_int4(const Linear& w, const Source& from, int64_t panel, char* out, float* units) {
  constexpr int64_t kHalf = kGroup / 2;
  for (int64_t lane = 0; lane < kPanelRows; ++lane) {
    const bf16* row = source_row(w, from, panel, lane);
    const float unit = row == nullptr ? 1.0f : row_unit(row, w.columns);
    units[panel * kPanelRows + lane] = unit;
    const bool broken = unit != unit;
    const int64_t columns = row == nullptr || broken ? 0 : w.columns;
    const Vec relative = vset(broken ? 1.0f : 1.0f / unit);
    for (int64_t g = 0; g < w.k / kGroup; ++g) {
      char* group = out + g * kGroupBytes;
      float x[kGroup];
      vstore(x, vmul(load_row(row, g * kGroup, columns), relative));
      vstore(x + kHalf, vmul(load_row(row, g * kGroup + kHalf, columns), relative));
      const uint8_t scale = best_scale(x);
      group[lane] = static_cast<char>(scale);
      const Vec inverse = vset(1.0f / scale_of(scale));
      const Ints low = to_ints(vadd(nibbles(vload(x), inverse), vset(8.0f)));
      const Ints high = to_ints(vadd(nibbles(vload(x + kHalf), inverse), vset(8.0f)));
      uint8_t halves[2][kHalf];
      store_bytes(halves[0], low);
      store_bytes(halves[1], high);
      for (int64_t b = 0; b < kHalf; ++b) {
        char* at = group + kPanelRows + ((b / 4) * kPanelRows + lane) * 4 + b % 4;
        *at = static_cast<char>(halves[0][b] | halves[1][b] << 4);
      }
    }
  }
}

}  // namespace

QUIRE_API int64_t quire_panel_count(const Linear* w) { return panel_count(*w); }

QUIRE_API int32_t quire_lay_out(Context* context, const Linear* w, const bf16* rows, const bf16* above) {
  return guarded(context, [&] {
    const Source from{rows, above};
    const int64_t panels = panel_count(*w);
    int64_t* starts = const_cast<int64_t*>(w->starts);
    Pool& pool = context->pool;
    pool.run([&](int worker) {
      Piece piece;
      while (pool.first.take(worker, panels, 1, &piece)) {
        starts[piece.begin + 1] = packed_panel_bytes(*w, from, piece.begin);
      }
    });
    starts[0] = 0;
    for (int64_t panel = 0; panel < panels; ++panel) starts[panel + 1] += starts[panel];
  });
}

QUIRE_API int32_t quire_pack(Context* context, const Linear* w, const bf16* rows, const bf16* above) {
  return guarded(context, [&] {
    const Source from{rows, above};
    Pool& pool = context->pool;
    context->reserve_own(2 * static_cast<size_t>(kPanelRows * w->k) * sizeof(bf16));
    pool.run([&](int worker) {
      char* stage = context->own[static_cast<size_t>(worker)].data();
      Piece piece;
      while (pool.first.take(worker, panel_count(*w), 1, &piece)) {
        const int64_t panel = piece.begin;
        char* out = const_cast<char*>(panel_at(*w, panel));
        switch (w->kind) {
          case WeightKind::kBf16: pack_bf16(*w, from, panel, stage, out); break;
          case WeightKind::kInt8:
            pack_int8(*w, from, panel, stage, out, const_cast<float*>(w->scales), const_cast<int32_t*>(w->sums));
            break;
          default: pack_int4(*w, from, panel, out, const_cast<float*>(w->scales));
        }
      }
    });
  });
}

}  // namespace quire
