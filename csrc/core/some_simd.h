#pragma once

// Loads and stores of groups of kWide registers. A group at the end of a row may be partly filled.

#include "core/element_simd.h"

namespace shoestring::cpu::SHOESTRING_CAPABILITY {

template <int kWide>
struct Some {
  F32 value[kWide];
};

// get_some() loads and put_some() stores n elements in memory order, at most kWide registers. Loading sets
// missing elements to zero.
template <class E, int kWide>
SHOESTRING_INLINE Some<kWide> get_some(const typename E::Type* p, int64_t n) {
  Some<kWide> some;
#pragma GCC unroll 4
  for (int k = 0; k < kWide; ++k) {
    some.value[k] =
        n == kWide * kLanes ? E::load(p + k * kLanes) : load_some<E>(p + k * kLanes, n - k * kLanes);
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

// get_any() loads and put_any() stores n elements, at most kWide registers. A full group has the element
// order of `Pair`, which is cheapest to load; a partial group at the end of a row has memory order.
template <class E, int kWide>
SHOESTRING_INLINE Some<kWide> get_any(const typename E::Type* p, int64_t n) {
  if (n < kWide * kLanes) return get_some<E, kWide>(p, n);
  Some<kWide> some;
#pragma GCC unroll 2
  for (int k = 0; k < kWide; k += 2) {
    const Pair pair = E::load_pair(p + k * kLanes);
    some.value[k] = pair.first, some.value[k + 1] = pair.second;
  }
  return some;
}
template <class E, int kWide>
SHOESTRING_INLINE void put_any(typename E::Type* p, const Some<kWide>& some, int64_t n) {
  if (n < kWide * kLanes) return put_some<E>(p, some, n);
#pragma GCC unroll 2
  for (int k = 0; k < kWide; k += 2) E::store_pair(p + k * kLanes, Pair{some.value[k], some.value[k + 1]});
}

// as_any() converts a group of n fp32 values from memory order to the element order of get_any(), and
// in_order() converts back.
template <class E, int kWide>
SHOESTRING_INLINE Some<kWide> as_any(Some<kWide> some, int64_t n) {
  for (int k = 0; k < kWide && n == kWide * kLanes; k += 2) {
    const Pair pair = E::as_pair({some.value[k], some.value[k + 1]});
    some.value[k] = pair.first, some.value[k + 1] = pair.second;
  }
  return some;
}
template <class E, int kWide>
SHOESTRING_INLINE Some<kWide> in_order(Some<kWide> some, int64_t n) {
  for (int k = 0; k < kWide && n == kWide * kLanes; k += 2) {
    const Pair pair = E::in_order({some.value[k], some.value[k + 1]});
    some.value[k] = pair.first, some.value[k + 1] = pair.second;
  }
  return some;
}

}  // namespace shoestring::cpu::SHOESTRING_CAPABILITY
