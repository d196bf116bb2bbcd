#include "gemm.h"

#include <algorithm>

#include "unroll.h"

namespace quire {
namespace {

constexpr int kVecs = kPanelRows / kLanes;  // accumulators per activation row
// 6 x 4 accumulators, 4 weights and a broadcast fit the 32 registers of AVX-512; narrower machines spill less with 2.
#if defined(QUIRE_AVX512)
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 2;
#endif
constexpr int kInt4TileRows = kTileRows / 2;  // two sets of accumulators
// k is cut so that a panel's slice stays in the second-level cache while the activation rows pass by.
constexpr int64_t kSliceBytes = 512 * 1024;
// Loads run ahead by about the latency of memory at the rate one core can read.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kStepBytes = kPanelRows * 4;

struct Bf16Dot {
  using Sum = Vec;
  using Lane = Pairs;
  static constexpr int64_t kValuesPerStep = 2;
  static Sum zero() { return vzero(); }
  static Sum load_sum(const float* p) { return vload(p); }
  static void store_sum(float* p, Sum s) { vstore(p, s); }
  static Lane load(const char* p) { return pload(reinterpret_cast<const bf16*>(p)); }
  static Lane broadcast(const char* p) { return pset(reinterpret_cast<const bf16*>(p)); }
  static Sum dot(Sum sum, Lane w, Lane a) { return dot2(sum, w, a); }
};

struct Int8Dot {
  using Sum = Ints;
  using Lane = Ints;
  static constexpr int64_t kValuesPerStep = 4;
  static Sum zero() { return izero(); }
  static Sum load_sum(const float* p) { return iload(p); }
  static void store_sum(float* p, Sum s) { istore(p, s); }
  static Lane load(const char* p) { return iload(p); }
  static Lane broadcast(const char* p) {
    int32_t quad;
    std::memcpy(&quad, p, 4);
    return iset(quad);
  }
  static Sum dot(Sum sum, Lane w, Lane a) { return dot4(sum, a, w); }
};

template <int64_t kBytes>
inline void prefetch(const void* p) {
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at);
}

// The weights that come after those of a tile: they travel from memory to the second-level cache while it computes,
// so that waiting for memory and computing take place at the same time.
struct Ahead {
  const char* follows;  // what is read after the tile's own weights
  const char* at;
  int64_t per_step;  // bytes
  int64_t lines;     // of 64 bytes, covering per_step; 0: nothing
};

// `count` steps of `kRows` activation rows against one panel. Sums are carried in `sums` [kRows][64] when `resume`;
// `cold` weights are still in memory, and so are the first of those that follow them.
template <typename Dot, int kRows>
void tile(const char* a, int64_t stride, const char* w, int64_t count, float* sums, bool resume, bool cold,
          const Ahead& ahead) {
  typename Dot::Sum acc[kRows][kVecs];
  unrolled<kRows>([&](auto r) {
    unrolled<kVecs>([&](auto v) { acc[r][v] = resume ? Dot::load_sum(sums + (r * kVecs + v) * kLanes) : Dot::zero(); });
  });
  const int64_t turn = count - kPrefetchBytes / kStepBytes;
  for (int64_t step = 0; step < count; ++step, w += kStepBytes) {
    if (cold) prefetch<kStepBytes>(step < turn ? w + kPrefetchBytes : ahead.follows + (step - turn) * kStepBytes);
    for (int64_t line = 0; line < ahead.lines; ++line) {
      __builtin_prefetch(ahead.at + step * ahead.per_step + line * 64, 0, 2);
    }
    typename Dot::Lane weights[kVecs];
    unrolled<kVecs>([&](auto v) { weights[v] = Dot::load(w + v * kLanes * 4); });
    unrolled<kRows>([&](auto r) {
      const typename Dot::Lane x = Dot::broadcast(a + r * stride + step * 4);
      unrolled<kVecs>([&](auto v) { acc[r][v] = Dot::dot(acc[r][v], weights[v], x); });
    });
  }
  unrolled<kRows>([&](auto r) {
    unrolled<kVecs>([&](auto v) { Dot::store_sum(sums + (r * kVecs + v) * kLanes, acc[r][v]); });
  });
}

template <typename Dot>
void any_tile(int64_t rows, const char* a, int64_t stride, const char* w, int64_t count, float* sums, bool resume,
              bool cold, const Ahead& ahead) {
  switch (rows) {
    case 1: return tile<Dot, 1>(a, stride, w, count, sums, resume, cold, ahead);
    case 2: return tile<Dot, 2>(a, stride, w, count, sums, resume, cold, ahead);
    case 3: return tile<Dot, 3>(a, stride, w, count, sums, resume, cold, ahead);
    case 4: return tile<Dot, 4>(a, stride, w, count, sums, resume, cold, ahead);
    case 5: return tile<Dot, 5>(a, stride, w, count, sums, resume, cold, ahead);
    default: return tile<Dot, 6>(a, stride, w, count, sums, resume, cold, ahead);
  }
}

constexpr int64_t kGroupBytes = kPanelRows * 2 + kPanelRows * kGroup / 2;

// int4: a group is 64 bf16 scales, then 4 steps of [64][4 bytes] whose low nibbles are k 4j.. and high nibbles k 16 + 4j..
template <int kRows>
void tile_int4(const int8_t* a, int64_t k, const int32_t* group_sums, const char* w, float* sums, bool cold,
               const char* follows) {
  const int64_t groups = k / kGroup;
  const int64_t turn = groups - kPrefetchBytes / kGroupBytes;
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) acc[r][v] = vzero();
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (cold) prefetch<kGroupBytes>(g < turn ? w + (groups - turn) * kGroupBytes : follows + (g - turn) * kGroupBytes);
    const bf16* scales = reinterpret_cast<const bf16*>(w);
    const char* nibbles = w + kPanelRows * 2;
    Ints part[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) part[r][v] = iset(-group_sums[r * groups + g]);
    }
    for (int j = 0; j < 4; ++j) {
      for (int v = 0; v < kVecs; ++v) {
        const Ints both = iload(nibbles + (j * kPanelRows + v * kLanes) * 4);
        const Ints low = low_nibbles(both), high = high_nibbles(both);
        for (int r = 0; r < kRows; ++r) {
          const char* x = reinterpret_cast<const char*>(a) + r * k + g * kGroup + 4 * j;
          part[r][v] = dot4(part[r][v], low, Int8Dot::broadcast(x));
          part[r][v] = dot4(part[r][v], high, Int8Dot::broadcast(x + kGroup / 2));
        }
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      const Vec scale = vload_bf16(scales + v * kLanes);
      for (int r = 0; r < kRows; ++r) acc[r][v] = vfma(to_vec(part[r][v]), scale, acc[r][v]);
    }
    w += kGroupBytes;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) vstore(sums + (r * kVecs + v) * kLanes, acc[r][v]);
  }
}

// Sums of one row of one panel as floats, bias added.
inline Vec finished(const Linear& w, const Rows& rows, int64_t row, int64_t lane, const float* sums) {
  Vec value;
  switch (w.kind) {
    case WeightKind::kBf16: value = vload(sums); break;
    case WeightKind::kInt8:
      value = vmul(to_vec(isub(iload(sums), iload(w.sums + lane))), vmul(vload(w.scales + lane), vset(rows.scales[row])));
      break;
    default: value = vmul(vload(sums), vset(rows.scales[row]));
  }
  return w.bias == nullptr ? value : vadd(value, vload(w.bias + lane));
}

// Stores up to 16 columns. The last ones of a matrix whose n is no multiple of 16 go through a full vector of memory.
template <bool kWhole>
inline void store(const Output& out, int64_t at, int64_t width, Vec value) {
  const size_t count = static_cast<size_t>(width);
  if (out.epilogue == Epilogue::kAdd) {
    if (kWhole) {
      value = vadd(value, vload_bf16(out.residual + at));
    } else {
      bf16 lanes[kLanes] = {};
      std::memcpy(lanes, out.residual + at, count * sizeof(bf16));
      value = vadd(value, vload_bf16(lanes));
    }
  }
  if (out.epilogue == Epilogue::kStoreFloat) {
    float* to = static_cast<float*>(out.data) + at;
    if (kWhole) return vstore(to, value);
    float lanes[kLanes];
    vstore(lanes, value);
    std::memcpy(to, lanes, count * sizeof(float));
  } else {
    bf16* to = static_cast<bf16*>(out.data) + at;
    if (kWhole) return vstore_bf16(to, value);
    bf16 lanes[kLanes];
    vstore_bf16(lanes, value);
    std::memcpy(to, lanes, count * sizeof(bf16));
  }
}

// Panels reach a worker in rising order, so that of equal values the first column stays.
void keep_best(const Vec* value, int64_t first, int64_t columns, Best* best) {
  float lanes[kPanelRows];
  Vec probe = vzero();  // x * 0 is not 0 for what is not finite
  Vec top = value[0];
  for (int v = 0; v < kVecs; ++v) {
    probe = vfma(value[v], vzero(), probe);
    top = vmax(top, value[v]);
    vstore(lanes + v * kLanes, value[v]);
  }
  if (!(lane_sum(probe) == 0.0f)) best->finite = false;
  const int64_t live = std::min<int64_t>(kPanelRows, columns - first);
  if (live == kPanelRows && best->column >= 0 && !(lane_max(top) > best->value)) return;
  for (int64_t i = 0; i < live; ++i) {
    if (best->column >= 0 && !(lanes[i] > best->value)) continue;
    best->value = lanes[i];
    best->column = first + i;
  }
}

void finish_row(const Linear& w, const Rows& rows, const Output& out, int64_t row, int64_t panel, const float* sums) {
  Vec value[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    value[v] = finished(w, rows, row, panel * kPanelRows + v * kLanes, sums + v * kLanes);
  }
  if (out.epilogue == Epilogue::kBest) return keep_best(value, panel * kPanelRows, w.n, out.best + row);
  int vecs = kVecs;
  int64_t first = panel * kPanelRows, columns = w.n;
  if (out.epilogue == Epilogue::kSiluMul) {
    vecs = kVecs / 2;
    first /= 2;
    columns /= 2;
    for (int v = 0; v < vecs; ++v) value[v] = vmul(vsilu(value[v]), value[vecs + v]);
  }
  for (int v = 0; v < vecs; ++v) {
    const int64_t column = first + v * kLanes;
    const int64_t width = std::min<int64_t>(kLanes, columns - column);
    if (width <= 0) return;
    const int64_t at = row * out.stride + column;
    if (width == kLanes) {
      store<true>(out, at, width, value[v]);
    } else {
      store<false>(out, at, width, value[v]);
    }
  }
}

// Activation rows in as few tiles as possible, as equal as possible: 8 rows are 4 + 4, 32 are 6 + 6 + 5 + 5 + 5 + 5.
struct Tiling {
  Tiling(int64_t m, int64_t limit) : count((m + limit - 1) / limit), base(m / count), larger(m % count) {}
  int64_t first(int64_t tile) const { return tile * base + std::min(tile, larger); }
  int64_t rows(int64_t tile) const { return base + (tile < larger ? 1 : 0); }
  int64_t count, base, larger;
};

// Steps of k that are walked before the next panel slice.
constexpr int64_t kSlice = kSliceBytes / kStepBytes;

template <typename Dot>
void gemm_stepped(Pieces& panels, const Linear& w, const Rows& rows, const Output& out, float* partial) {
  const int64_t steps = w.k / Dot::kValuesPerStep;
  const Tiling tiling(rows.m, kTileRows);
  const int64_t stride = steps * 4;
  const bool whole = steps <= kSlice;
  const int64_t num_panels = panel_count(w);
  const auto address = [&](int64_t panel, int64_t step) {
    return static_cast<const char*>(w.packed) + panel * panel_bytes(w) + step * kStepBytes;
  };
  // Many tiles bring all of the next panel. Of few the first waits for its own panel, whose loads are then the best
  // prefetch, and the others bring what they have time for.
  const bool brings_all = tiling.count > 3;
  const int64_t first_ahead = brings_all ? 0 : 1;
  const int64_t per_step = brings_all ? kStepBytes / tiling.count : 64;
  bool cold = true;
  int64_t panel, next, end;
  bool taken = panels.take(num_panels, 1, &next, &end);
  while (taken) {
    panel = next;
    taken = panels.take(num_panels, 1, &next, &end);
    if (w.scales != nullptr) prefetch<kPanelRows * 4>(w.scales + panel * kPanelRows);
    if (w.sums != nullptr) prefetch<kPanelRows * 4>(w.sums + panel * kPanelRows);
    for (int64_t step = 0; step < steps; step += kSlice) {
      const int64_t count = std::min(kSlice, steps - step);
      const bool last_slice = step + count == steps;
      // At the very end the start of this panel, which is in the cache.
      const bool ends = last_slice && !taken;
      const char* after = ends ? address(panel, step) : last_slice ? address(next, 0) : address(panel, step + count);
      for (int64_t t = 0; t < tiling.count; ++t) {
        const int64_t m = tiling.first(t), live = tiling.rows(t);
        float* sums = partial + (whole ? 0 : m * kPanelRows);
        const char* a = static_cast<const char*>(rows.data) + m * stride + step * 4;
        const int64_t lines = !ends && t >= first_ahead ? (per_step + 63) / 64 : 0;
        const Ahead ahead{after, after + (t - first_ahead) * count * per_step, per_step, lines};
        any_tile<Dot>(live, a, stride, address(panel, step), count, sums, step > 0, cold && t == 0, ahead);
        if (!last_slice) continue;
        for (int64_t r = 0; r < live; ++r) finish_row(w, rows, out, m + r, panel, sums + r * kPanelRows);
      }
      cold = !brings_all;
    }
  }
}

void gemm_int4(Pieces& panels, const Linear& w, const Rows& rows, const Output& out, float* sums) {
  const Tiling tiling(rows.m, kInt4TileRows);
  const int64_t groups = w.k / kGroup, num_panels = panel_count(w);
  const auto address = [&](int64_t panel) { return static_cast<const char*>(w.packed) + panel * panel_bytes(w); };
  int64_t panel, next, end;
  bool taken = panels.take(num_panels, 1, &next, &end);
  while (taken) {
    panel = next;
    taken = panels.take(num_panels, 1, &next, &end);
    const char* follows = address(taken ? next : panel);
    for (int64_t t = 0; t < tiling.count; ++t) {
      const int64_t m = tiling.first(t), live = tiling.rows(t);
      const int8_t* a = static_cast<const int8_t*>(rows.data) + m * w.k;
      with_count<kInt4TileRows>(static_cast<int>(live), [&](auto number) {
        tile_int4<number>(a, w.k, rows.sums + m * groups, address(panel), sums, m == 0, follows);
      });
      for (int64_t r = 0; r < live; ++r) finish_row(w, rows, out, m + r, panel, sums + r * kPanelRows);
    }
  }
}

}  // namespace

int64_t gemm_scratch_bytes(const Linear& w, int64_t m) {
  const int64_t steps = w.kind == WeightKind::kBf16 ? w.k / Bf16Dot::kValuesPerStep : w.k / Int8Dot::kValuesPerStep;
  const bool whole = w.kind == WeightKind::kInt4 || steps <= kSlice;
  return (whole ? kTileRows : m) * kPanelRows * static_cast<int64_t>(sizeof(float));
}

void gemm_worker(Pieces& panels, const Linear& w, const Rows& rows, const Output& out, char* scratch) {
  float* sums = reinterpret_cast<float*>(scratch);
  switch (w.kind) {
    case WeightKind::kBf16: return gemm_stepped<Bf16Dot>(panels, w, rows, out, sums);
    case WeightKind::kInt8: return gemm_stepped<Int8Dot>(panels, w, rows, out, sums);
    default: return gemm_int4(panels, w, rows, out, sums);
  }
}

}  // namespace quire
