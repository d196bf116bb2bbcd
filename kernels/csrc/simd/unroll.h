// Counts known to the compiler: blocks of arithmetic keep their sums in registers only if every index is a constant.
//
// Must not know: what is computed.
#pragma once

#include <type_traits>
#include <utility>

namespace quire {

// Clang calls blocks instead of inlining them unless it must. gcc must not: it then calls what is inside.
#if defined(__clang__)
#define QUIRE_BLOCK [[gnu::always_inline]]
#else
#define QUIRE_BLOCK
#endif

// Calls f with `count` in [1, kMost] as a compile-time constant.
template <int kMost, typename F>
inline void with_count(int count, const F& f) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, f);
  }
  f(std::integral_constant<int, kMost>{});
}

template <typename F, int... kIndex>
QUIRE_BLOCK inline void unrolled_over(const F& f, std::integer_sequence<int, kIndex...>) {
  (f(std::integral_constant<int, kIndex>{}), ...);
}

// Calls f with 0, 1, ... kCount - 1 as compile-time constants.
template <int kCount, typename F>
QUIRE_BLOCK inline void unrolled(const F& f) {
  unrolled_over(f, std::make_integer_sequence<int, kCount>{});
}

}  // namespace quire
