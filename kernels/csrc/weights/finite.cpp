// Whether all values of a matrix are finite numbers.
//
// Promises: reads every value once, at the speed of memory, with all workers. Must not know: packing, which matrix it
// is.
#include <algorithm>
#include <atomic>

#include "ops.h"
#include "runtime/context.h"

namespace quire {

QUIRE_API int32_t quire_all_finite(Context* context, const bf16* values, int64_t count, uint8_t* finite) {
  return guarded(context, [&] {
    constexpr int64_t kPiece = 1 << 19;  // values: large enough that workers seldom ask for more
    constexpr bf16 kExponent = 0x7f80;   // all ones: infinite, or not a number
    const int64_t pieces = (count + kPiece - 1) / kPiece;
    std::atomic<bool> broken{false};
    Pool& pool = context->pool;
    pool.run([&](int worker) {
      Piece piece;
      while (pool.first.take(worker, pieces, 1, &piece)) {
        const bf16* from = values + piece.begin * kPiece;
        const int64_t number = std::min(kPiece, count - piece.begin * kPiece);
        uint16_t found = 0;
        for (int64_t i = 0; i < number; ++i) {
          found = static_cast<uint16_t>(found | ((from[i] & kExponent) == kExponent ? 1 : 0));
        }
        if (found != 0) broken = true;
      }
    });
    *finite = broken ? 0 : 1;
  });
}

}  // namespace quire
