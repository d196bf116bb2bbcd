// Blocks of a matrix product in registers: some activation rows against one panel.
//
// Promises: every sum is one accumulator that walks k in order, whatever the number of rows.
// Must not know: who computes which panel, what becomes of the sums.
#pragma once

#include "gemm/gemm_rows.h"
#include "simd/unroll.h"
#include "weights/coded.h"

namespace quire {

constexpr int kVecs = kPanelRows / kLanes;  // accumulators per activation row
// How many vectors of a panel's width a tile of so many rows takes in one pass: see kTileRows. Few rows wait for
// memory, which a single pass reads in order.
constexpr int pass_vecs(int rows) { return kRegisters >= 32 || rows <= 2 ? kVecs : 1; }
// int4 has two sets of accumulators.
constexpr int kInt4Rows = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 4 : 2;
constexpr int int4_vecs(int rows) {
  if (kRegisters >= 32) return rows <= 3 ? kVecs : kVecs / 2;
  return rows == 1 ? kVecs : 1;
}
// Loads run ahead by about the latency of memory at the rate one core can read.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kStepBytes = kPanelRows * 4;

struct Bf16Dot {
  static constexpr WeightKind kKind = WeightKind::kBf16;
  static constexpr int kParts = kPairParts;
  using Sum = Vec;
  using Lane = Pairs;
  using Part = PairPart;
  static constexpr int64_t kValuesPerStep = 2;
  static Sum zero() { return vzero(); }
  static Sum load_sum(const float* p) { return vload(p); }
  static void store_sum(float* p, Sum s) { vstore(p, s); }
  static Lane load(const char* p) { return pload(reinterpret_cast<const bf16*>(p)); }
  template <int kPart>
  static Part part(Lane w) {
    return pair_part<kPart>(w);
  }
  static Part factor(const char* p) { return pair_factor(reinterpret_cast<const PairFactor*>(p)); }
  static Sum dot(Sum sum, Part w, Part a) { return pair_product(sum, w, a); }
};

struct Int8Dot {
  static constexpr WeightKind kKind = WeightKind::kInt8;
  static constexpr int kParts = kQuadParts;
  using Sum = Ints;
  using Lane = Ints;
  using Part = Ints;
  static constexpr int64_t kValuesPerStep = 4;
  static Sum zero() { return izero(); }
  static Sum load_sum(const float* p) { return iload(p); }
  static void store_sum(float* p, Sum s) { istore(p, s); }
  static Lane load(const char* p) { return iload(p); }
  template <int kPart>
  static Part part(Lane w) {
    return quad_part<kPart>(w);
  }
  static Part factor(const char* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return iset(bytes);
  }
  static Sum dot(Sum sum, Part w, Part a) { return quad_product(sum, w, a); }
};

// Reads the steps of one panel whose weights lie in memory as they are, one after the other.
template <typename Dot>
class PlainSteps {
 public:
  explicit PlainSteps(const char* first) : at_(first) {}
  static constexpr int64_t kBytes = kStepBytes;
  const char* at() const { return at_; }
  // The vectors of the step from `first` on.
  template <int kWide>
  void next(typename Dot::Lane (&weights)[kWide], int first) {
    unrolled<kWide>([&](auto v) { weights[v] = Dot::load(at_ + (first + v) * kLanes * 4); });
    at_ += kStepBytes;
  }

 private:
  const char* at_;
};

// Whether a tile's weights are still in memory: then it fetches what it will load, and the start of what follows.
enum class Cold {
  kNo,
  kOnce,   // no other tile meets them: fetched past the caches, which then keep what the rest of the machine works with
  kShared  // other tiles follow
};

template <int64_t kBytes, bool kOnce = false>
inline void prefetch(const void* p) {
  for (int64_t at = 0; at < kBytes; at += 64) __builtin_prefetch(static_cast<const char*>(p) + at, 0, kOnce ? 0 : 3);
}

template <int64_t kBytes>
inline void prefetch(Cold cold, const void* p) {
  if (cold == Cold::kOnce) prefetch<kBytes, true>(p);
  if (cold == Cold::kShared) prefetch<kBytes>(p);
}

// The weights that come after those of a tile: they travel from memory to the second-level cache while it computes,
// so that waiting for memory and computing take place at the same time.
struct Ahead {
  const char* follows;  // what comes after the tile: the last steps of cold weights fetch its first kPrefetchBytes
  const char* at;       // what every step fetches a part of
  int64_t per_step;     // bytes; for int4 per group
  int64_t lines;        // of 64 bytes, covering per_step; 0: nothing
};

// `count` steps of `kRows` activation rows, which begin at `a`, against kWide vectors of a panel from `first` on. Sums
// are carried in `sums` [kRows][64] when `resume`. Flattened: gcc would call single products where they take many
// instructions.
template <typename Dot, int kRows, int kWide, typename Steps>
[[gnu::flatten]] void tile(const char* a, const Placing<Dot::kParts>& placing, Steps steps, int first, int64_t count,
                           float* sums, bool resume, Cold cold, const Ahead& ahead) {
  typename Dot::Sum acc[kRows][kWide];
  sums += first * kLanes;
  unrolled<kRows>([&](auto r) {
    unrolled<kWide>([&](auto v) { acc[r][v] = resume ? Dot::load_sum(sums + (r * kVecs + v) * kLanes) : Dot::zero(); });
  });
  const int64_t turn = count - kPrefetchBytes / Steps::kBytes;
  for (int64_t step = 0; step < count; ++step) {
    if (cold != Cold::kNo) {
      const char* next = step < turn ? steps.at() + kPrefetchBytes : ahead.follows + (step - turn) * Steps::kBytes;
      prefetch<Steps::kBytes>(cold, next);
    }
    for (int64_t line = 0; line < ahead.lines; ++line) {
      __builtin_prefetch(ahead.at + step * ahead.per_step + line * 64, 0, 2);
    }
    typename Dot::Lane weights[kWide];
    steps.next(weights, first);
    const auto factor = [&](auto part, auto r) {
      return Dot::factor(a + placing.template step_offset<kRows>(step, part, r));
    };
    if constexpr (Dot::kParts > 1 && kWide > 1 && kRegisters < 32) {  // too few for the parts of all weights
      unrolled<kWide>([&](auto v) {
        unrolled<Dot::kParts>([&](auto part) {
          const typename Dot::Part w = Dot::template part<part>(weights[v]);
          unrolled<kRows>([&](auto r) { acc[r][v] = Dot::dot(acc[r][v], w, factor(part, r)); });
        });
      });
    } else {
      unrolled<Dot::kParts>([&](auto part) {
        typename Dot::Part w[kWide];
        unrolled<kWide>([&](auto v) { w[v] = Dot::template part<part>(weights[v]); });
        unrolled<kRows>([&](auto r) {
          const typename Dot::Part x = factor(part, r);
          unrolled<kWide>([&](auto v) { acc[r][v] = Dot::dot(acc[r][v], w[v], x); });
        });
      });
    }
  }
  unrolled<kRows>(
      [&](auto r) { unrolled<kWide>([&](auto v) { Dot::store_sum(sums + (r * kVecs + v) * kLanes, acc[r][v]); }); });
}

// `ahead()`: what the next pass over the panel fetches. Only the first meets weights that are still in memory.
template <typename Dot, int kMost, typename Steps, typename Next>
void any_tile(int64_t rows, const char* a, const Placing<Dot::kParts>& placing, const Steps& steps, int64_t count,
              float* sums, bool resume, Cold cold, const Next& ahead) {
  with_count<kMost>(static_cast<int>(rows), [&](auto number) {
    constexpr int kWide = pass_vecs(number);
    for (int pass = 0; pass < kVecs / kWide; ++pass) {
      tile<Dot, number, kWide>(a, placing, steps, pass * kWide, count, sums, resume, pass == 0 ? cold : Cold::kNo,
                               ahead());
    }
  });
}

// int4: a group is 64 scales of a byte (scale.h), then 4 steps of [64][4 bytes] whose low nibbles are k 4j.. and high
// nibbles k 16 + 4j.. The panel's output rows from lane `first` on, kWide vectors of them. Plain loops: the compiler
// unrolls them as well, and turns them into vectors where it has to.
template <int kRows, int kWide>
[[gnu::noinline]] void tile_int4(const int8_t* a, int64_t k, const int32_t* group_sums, const char* w, int64_t first,
                                 float* sums, Cold cold, const Ahead& ahead) {
  const int64_t groups = k / kGroup;
  const int64_t turn = groups - kPrefetchBytes / kGroupBytes;
  Vec acc[kRows][kWide];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kWide; ++v) acc[r][v] = vzero();
  }
  for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
    const char* next = g < turn ? w + (groups - turn) * kGroupBytes : ahead.follows + (g - turn) * kGroupBytes;
    prefetch<kPanelRows>(cold, next);
    for (int64_t line = 0; line < ahead.lines; ++line) {
      __builtin_prefetch(ahead.at + g * ahead.per_step + line * 64, 0, 2);
    }
    Ints part[kRows][kWide];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kWide; ++v) part[r][v] = nibble_start(group_sums[r * groups + g]);
    }
    for (int j = 0; j < 4; ++j) {
      prefetch<kStepBytes>(cold, next + kPanelRows + j * kStepBytes);
      const char* nibbles = w + kPanelRows + j * kStepBytes + first * 4;
      const char* x = reinterpret_cast<const char*>(a) + g * kGroup + 4 * j;
      Ints low[kWide], high[kWide];
      for (int v = 0; v < kWide; ++v) {
        const Ints both = iload(nibbles + v * kLanes * 4);
        low[v] = low_nibbles(both);
        high[v] = high_nibbles(both);
      }
      for (int r = 0; r < kRows; ++r) {
        const Ints x_low = Int8Dot::factor(x + r * k), x_high = Int8Dot::factor(x + r * k + kGroup / 2);
        for (int v = 0; v < kWide; ++v) part[r][v] = nibble_dot(part[r][v], low[v], x_low);
        for (int v = 0; v < kWide; ++v) part[r][v] = nibble_dot(part[r][v], high[v], x_high);
      }
    }
    for (int v = 0; v < kWide; ++v) {
      const Vec scale = vload_scales(reinterpret_cast<const uint8_t*>(w) + first + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec sum = to_vec(nibble_total(part[r][v], group_sums[r * groups + g]));
        acc[r][v] = vfma(sum, scale, acc[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kWide; ++v) vstore(sums + r * kPanelRows + first + v * kLanes, acc[r][v]);
  }
}

}  // namespace quire
