#pragma once

// An array in memory that kernels may access: GPU memory if compiled with CUDA's headers, else host memory
// that is registered with the emulator.

#include <stdexcept>
#include <vector>

#include <cuda_runtime.h>

namespace simt_tests {

#if defined(CUDART_VERSION)

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    check(cudaMalloc(&data_, size_ * sizeof(T)));
    check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;

  T* data() { return data_; }
  std::vector<T> to_host() const {  // copies the array to the host after all earlier kernels have finished
    std::vector<T> values(size_);
    check(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

#else

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : values_(values) {
    // The gap of 64 bytes before the next allocation is not registered, so the emulator detects accesses to
    // it.
    values_.resize(values.size() + 64 / sizeof(T));
    simt::add_memory(values_.data(), values.size() * sizeof(T));
  }
  ~DeviceArray() { simt::remove_memory(values_.data()); }
  DeviceArray(const DeviceArray&) = delete;

  T* data() { return values_.data(); }
  std::vector<T> to_host() const { return {values_.begin(), values_.end() - 64 / sizeof(T)}; }

 private:
  std::vector<T> values_;
};

#endif

}  // namespace simt_tests
