#include "stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "streams.h"

namespace simdev {

struct CallStack {
  std::array<void*, 28> frames{};
  int count = 0;
  std::string python;
};

namespace {

// A thread may free tensors while its own objects are destroyed.
thread_local bool is_thread_ending = false;
struct Prepared {
  StackPtr stack;
  ~Prepared() { is_thread_ending = true; }
};
thread_local Prepared prepared;

// One line: the library, and the function or else the offset, which addr2line understands.
std::string text_of_frame(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) return "?";
  const char* slash = std::strrchr(info.dli_fname, '/');
  std::string text = slash == nullptr ? info.dli_fname : slash + 1;
  const auto offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase);
  char number[32];
  std::snprintf(number, sizeof number, "+0x%tx ", offset);
  text += number;
  if (info.dli_sname != nullptr) {
    int status = 0;
    char* name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string function = status == 0 ? name : info.dli_sname;
    std::free(name);
    if (function.size() > 120) function = function.substr(0, 117) + "...";
    text += function;
  }
  return text;
}

}  // namespace

std::string python_stack() {
  // faulthandler prints stacks by the same function. It reads only frames of this thread, which does not run
  // Python now.
  using State = void*;
  static const auto state_of_this_thread =
      reinterpret_cast<State (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  static const auto dump = reinterpret_cast<void (*)(int, State)>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  if (state_of_this_thread == nullptr || dump == nullptr) return "";
  const State state = state_of_this_thread();
  if (state == nullptr) return "";
  int ends[2];
  if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return "";
  dump(ends[1], state);  // text that does not fit into the pipe is lost
  close(ends[1]);
  std::string text(1 << 16, '\0');
  const ssize_t size = read(ends[0], text.data(), text.size());
  close(ends[0]);
  text.resize(size < 0 ? 0 : static_cast<size_t>(size));
  return text;
}

void prepare_stack() {
  if (is_thread_ending) return;
  auto stack = std::make_shared<CallStack>();
  stack->count = backtrace(stack->frames.data(), static_cast<int>(stack->frames.size()));
  if (config().stacks) stack->python = python_stack();
  prepared.stack = std::move(stack);
}

StackPtr prepared_stack() { return is_thread_ending ? nullptr : prepared.stack; }

std::string text_of(const StackPtr& stack) {
  if (stack == nullptr) return "    (no stack)\n";
  std::string text;
  for (int i = 2; i < stack->count; ++i) {  // leaves out this function and enqueue()
    const std::string line = text_of_frame(stack->frames[i]);
    if (line.rfind("libpython", 0) == 0 || line.rfind("python", 0) == 0) break;
    text += "    " + line + "\n";
  }
  return text + stack->python;
}

}  // namespace simdev
