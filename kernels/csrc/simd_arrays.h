// The lanes of simd.h as plain arrays, for every machine.
//
// Owns the meaning of each operation: it is the specification of the other two. Must not know: matrices, attention.
#pragma once

#include <cmath>

#include "bf16.h"
#include "scale.h"

namespace quire {

struct Vec {
  float v[kLanes];
};
struct Pairs {
  bf16 v[2 * kLanes];
};

template <typename F>
inline Vec each(const F& f) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline Vec vzero() { return each([](int) { return 0.0f; }); }
inline Vec vset(float x) { return each([=](int) { return x; }); }
inline Vec vload(const float* p) { return each([=](int i) { return p[i]; }); }
inline void vstore(float* p, Vec a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Vec vadd(Vec a, Vec b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline Vec vsub(Vec a, Vec b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec vmul(Vec a, Vec b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline Vec vdiv(Vec a, Vec b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
inline Vec vfma(Vec a, Vec b, Vec c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline Vec vmax(Vec a, Vec b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec vmin(Vec a, Vec b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline Vec vround(Vec a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
inline Vec vscale2(Vec a, Vec n) {
  return each([&](int i) { return n.v[i] == n.v[i] ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : n.v[i]; });
}
inline Vec vload_bf16(const bf16* p) { return each([=](int i) { return to_float(p[i]); }); }
inline void vstore_bf16(bf16* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bf16(a.v[i]);
}
inline Vec vstore_rounded(bf16* p, Vec a) {
  vstore_bf16(p, a);
  return vload_bf16(p);
}
inline Vec vload_scales(const uint8_t* p) { return each([=](int i) { return scale_of(p[i]); }); }
inline Pairs pload(const bf16* p) {
  Pairs r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline void pstore(bf16* p, Pairs a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Pairs pset(const bf16* pair) {
  Pairs r;
  for (int i = 0; i < 2 * kLanes; ++i) r.v[i] = pair[i & 1];
  return r;
}
inline Vec dot2(Vec acc, Pairs w, Pairs a) {
  return each([&](int i) {
    const float even = to_float(w.v[2 * i]) * to_float(a.v[2 * i]) + acc.v[i];
    return to_float(w.v[2 * i + 1]) * to_float(a.v[2 * i + 1]) + even;
  });
}

struct Ints {
  int32_t v[kLanes];
};
template <typename F>
inline Ints each_int(const F& f) {
  Ints r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = f(i);
  return r;
}
inline Ints izero() { return each_int([](int) { return 0; }); }
inline Ints iload(const void* p) {
  Ints r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline void istore(void* p, Ints a) { std::memcpy(p, a.v, sizeof(a.v)); }
inline Ints iset(int32_t x) { return each_int([=](int) { return x; }); }
inline Ints iadd(Ints a, Ints b) { return each_int([&](int i) { return a.v[i] + b.v[i]; }); }
inline Ints isub(Ints a, Ints b) { return each_int([&](int i) { return a.v[i] - b.v[i]; }); }
inline Vec to_vec(Ints a) { return each([&](int i) { return static_cast<float>(a.v[i]); }); }
inline Ints to_ints(Vec a) {  // ties to even
  return each_int([&](int i) { return static_cast<int32_t>(std::nearbyint(a.v[i])); });
}
inline Ints low_nibbles(Ints a) { return each_int([&](int i) { return a.v[i] & 0x0f0f0f0f; }); }
inline Ints high_nibbles(Ints a) {
  return each_int([&](int i) { return static_cast<int32_t>((static_cast<uint32_t>(a.v[i]) >> 4) & 0x0f0f0f0fu); });
}
inline Ints dot4(Ints acc, Ints u, Ints s) {
  return each_int([&](int i) {
    uint8_t x[4];
    int8_t y[4];
    std::memcpy(x, &u.v[i], 4);
    std::memcpy(y, &s.v[i], 4);
    return acc.v[i] + x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
  });
}

}  // namespace quire
