#pragma once

#include <vector>

#include "simt.h"

namespace simt_tests {

// A zero-initialised array that kernels may access while the object exists.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : values_(n + 32 / sizeof(T)) { simt::add_memory(data(), n * sizeof(T)); }
  ~Array() { simt::remove_memory(data()); }
  Array(const Array&) = delete;
  T* data() { return values_.data(); }
  T& operator[](size_t i) { return values_[i]; }

 private:
  std::vector<T> values_;
};

}  // namespace simt_tests
