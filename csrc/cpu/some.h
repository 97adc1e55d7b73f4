#pragma once

// Several registers that move together, also at the end of a row.

#include "cpu/element.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

template <int kWide>
struct Some {
  F32 value[kWide];
};

// n: kWide registers of elements, or fewer at a row's end, where what is missing is zero.
template <class E, int kWide>
SHOESTRING_INLINE Some<kWide> get_some(const typename E::Type* p, int64_t n) {
  Some<kWide> some;
#pragma GCC unroll 4
  for (int k = 0; k < kWide; ++k) {
    some.value[k] = n == kWide * kLanes ? E::load(p + k * kLanes) : load_some<E>(p + k * kLanes, n - k * kLanes);
  }
  return some;
}
template <class E, int kWide>
SHOESTRING_INLINE void put_some(typename E::Type* p, const Some<kWide>& some, int64_t n) {
  typename E::Type rest[kWide * kLanes], *to = n == kWide * kLanes ? p : rest;
#pragma GCC unroll 2
  for (int k = 0; k < kWide; k += 2) E::store(to + k * kLanes, some.value[k], some.value[k + 1]);
  if (n < kWide * kLanes) __builtin_memcpy(p, rest, n * sizeof rest[0]);
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
