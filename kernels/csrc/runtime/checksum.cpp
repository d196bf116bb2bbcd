// A checksum of memory as fast as memory is read: XXH64 with seed 0, as its specification has it.
//
// It finds damage; it is no proof against who may write to our files. Owns nothing. Must not know: what is in memory.
#include <cstring>

#include "ops.h"

namespace quire {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t rotated(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

inline uint64_t mixed(uint64_t sum, uint64_t word) { return rotated(sum + word * kPrime2, 31) * kPrime1; }

template <typename Word>
inline Word word_at(const char* data) {
  Word word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

uint64_t checksum(const char* data, int64_t bytes) {
  constexpr int kSums = 4;
  constexpr int64_t kStripe = kSums * 8;
  const char* end = data + bytes;
  uint64_t hash = kPrime5;
  if (bytes >= kStripe) {
    uint64_t sums[kSums] = {kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1};
    for (; end - data >= kStripe; data += kStripe) {
      for (int i = 0; i < kSums; ++i) sums[i] = mixed(sums[i], word_at<uint64_t>(data + 8 * i));
    }
    hash = rotated(sums[0], 1) + rotated(sums[1], 7) + rotated(sums[2], 12) + rotated(sums[3], 18);
    for (const uint64_t sum : sums) hash = (hash ^ mixed(0, sum)) * kPrime1 + kPrime4;
  }
  hash += static_cast<uint64_t>(bytes);
  for (; end - data >= 8; data += 8) {
    hash = rotated(hash ^ mixed(0, word_at<uint64_t>(data)), 27) * kPrime1 + kPrime4;
  }
  for (; end - data >= 4; data += 4) {
    hash = rotated(hash ^ word_at<uint32_t>(data) * kPrime1, 23) * kPrime2 + kPrime3;
  }
  for (; data < end; ++data) hash = rotated(hash ^ static_cast<uint8_t>(*data) * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace

QUIRE_API int64_t quire_checksum(const char* data, int64_t bytes) {
  return static_cast<int64_t>(checksum(data, bytes));
}

}  // namespace quire
