#pragma once

// Guards objects that own threads against use in a forked child.

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

namespace shoestring::offload {

/// Remembers the process that created an object. A forked child inherits the object but none of its threads:
/// a lock may stay locked forever, and no thread may be left to end a wait. In a child, destructors only
/// close inherited file descriptors, and every other use raises.
class OwnProcess {
 public:
  bool is_here() const { return ::getpid() == id_; }
  void check(const std::string& caller) const {
    TORCH_CHECK(is_here(), caller, ": expected process ", id_,
                ", which created this object, received its forked child ", ::getpid(),
                ". Create a new object in the child, or use this one in process ", id_, " alone.");
  }

 private:
  pid_t id_ = ::getpid();
};

/// Deletes an object only in the process that created it. A forked child leaks the object, because destroying
/// it is unsafe: the destructor of a joinable thread ends the process, and that of a condition variable
/// blocks if a thread waits on it.
struct DeleteInOwnProcess {
  OwnProcess process;

  template <class T>
  void operator()(T* object) const {
    if (process.is_here()) delete object;
  }
};

template <class T>
using ProcessOwned = std::unique_ptr<T, DeleteInOwnProcess>;

template <class T, class... Args>
ProcessOwned<T> make_process_owned(Args&&... args) {
  return ProcessOwned<T>(new T(std::forward<Args>(args)...));
}

}  // namespace shoestring::offload
