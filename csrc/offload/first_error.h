#pragma once

#include <exception>
#include <utility>

namespace shoestring::offload {

/// Does several things although one of them throws, which is said at the end.
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
