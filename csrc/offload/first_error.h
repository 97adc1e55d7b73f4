#pragma once

#include <exception>
#include <utility>

namespace shoestring::offload {

/// Runs several functions even if one of them throws, and keeps the first exception. rethrow() throws it
/// again.
class FirstError {
 public:
  template <class Body>
  void guard(Body&& body) {
    try {
      std::forward<Body>(body)();
    } catch (...) {
      if (error_ == nullptr) error_ = std::current_exception();
    }
  }
  explicit operator bool() const { return error_ != nullptr; }
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

}  // namespace shoestring::offload
