// The names of the instruction set in use and of the instructions that products are made of, as CPU manuals have them.
//
// Promises: no name for what the hardware lacks and is emulated, which is no limit of the machine. Included by simd.h.
#pragma once

namespace quire {

// As quire_kernels/cpu/variants.py names it.
#if defined(QUIRE_AMX)
constexpr const char* kVariant = "amx";
#elif defined(QUIRE_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr const char* kVariant = "avx512_bf16";
#elif defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
constexpr const char* kVariant = "avx512_vnni";
#elif defined(QUIRE_AVX512)
constexpr const char* kVariant = "avx512";
#elif defined(QUIRE_AVX2) && defined(__AVXVNNI__)
constexpr const char* kVariant = "avx2_vnni";
#elif defined(QUIRE_AVX2)
constexpr const char* kVariant = "avx2";
#elif defined(QUIRE_NEON_BF16)
constexpr const char* kVariant = "neon_bf16";
#else
constexpr const char* kVariant = "portable";
#endif

// Of floats.
#if defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
constexpr const char* kFloatInstruction = "VFMADD231PS";
#elif defined(__aarch64__)
constexpr const char* kFloatInstruction = "FMLA";
#else
constexpr const char* kFloatInstruction = "plain C++";
#endif

// Of pairs of bf16.
#if defined(QUIRE_AMX)
constexpr const char* kPairInstruction = "TDPBF16PS";
#elif defined(__AVX512BF16__)
constexpr const char* kPairInstruction = "VDPBF16PS";
#elif defined(QUIRE_NEON_BF16)
constexpr const char* kPairInstruction = "BFDOT";
#else
constexpr const char* kPairInstruction = "";
#endif

// Of quads of bytes; where there is none for bytes, they are multiplied as 16 bits in parts.
#if defined(QUIRE_AMX)
constexpr const char* kQuadInstruction = "TDPBUSD";
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr const char* kQuadInstruction = "VPDPBUSD";
#elif defined(QUIRE_AVX512) || defined(QUIRE_AVX2)
constexpr const char* kQuadInstruction = "VPMADDWD";
#elif defined(QUIRE_NEON_BF16)
constexpr const char* kQuadInstruction = "USDOT";
#elif defined(__aarch64__)
constexpr const char* kQuadInstruction = "SADALP";
#elif defined(__SSE2__)
constexpr const char* kQuadInstruction = "PMADDWD";
#else
constexpr const char* kQuadInstruction = "plain C++";
#endif

}  // namespace quire
