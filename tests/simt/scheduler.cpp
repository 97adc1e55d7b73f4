// Runs the threads of a block as fibres on one thread of the process. A fibre runs until it has to wait for
// other ones; the last one that arrives at a barrier releases those that wait.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <string_view>
#include <utility>

#include "internal.h"

namespace simt {

Block block;
std::vector<Thread> threads(kMaxThreads);
Thread* current = nullptr;
char* stacks = nullptr;

namespace {

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  bool started = false;
};

std::vector<Fiber> fibers(kMaxThreads);
jmp_buf scheduler;
void (*kernel)(void*) = nullptr;
void* kernel_arguments = nullptr;
std::string error;
std::vector<Launch> log;
bool logged = false, only_logged = false;
int fixed_order = [] {
  const char* text = std::getenv("SIMT_ORDER");
  return text ? std::atoi(text) : -1;
}();

// setjmp is called only in functions that are not inlined. Otherwise a caller could keep a variable in a
// register across the jump.
__attribute__((noinline)) void yield() {
  Fiber& fiber = fibers[current->id];
  if (_setjmp(fiber.resume) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
  for (;;) {
    kernel(kernel_arguments);
    finish_thread();
    current->done = true;
    yield();
  }
}

__attribute__((noinline)) void resume(Thread& thread) {
  Fiber& fiber = fibers[thread.id];
  current = &thread;
  if (_setjmp(scheduler) == 0) {
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks + thread.id * kStack;
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    setcontext(&fiber.start);
  }
  current = nullptr;
}

// Describes where each thread waits; called when no thread can continue.
std::string standstill() {
  std::map<std::string, std::vector<int>> places;
  for (int t = 0; t < block.threads; ++t) {
    const Thread& thread = threads[t];
    places[thread.done ? "have returned"
                       : std::string("wait at ") + thread.at + " (" + text_of(thread.where) + ")"]
        .push_back(t);
  }
  std::string text = "threads wait for others that never come:";
  for (const auto& [place, ids] : places) {
    text +=
        " " + std::to_string(ids.size()) + " (the first is " + std::to_string(ids[0]) + ") " + place + ";";
  }
  text.pop_back();
  return text + state_of_mbarriers();
}

void run_block(const std::vector<int>& order, std::mt19937& random, bool shuffle) {
  begin_block();
  auto nothing = std::make_shared<std::vector<uint32_t>>(block.threads, 0);
  for (int t = 0; t < block.threads; ++t) {
    Thread& thread = threads[t];
    thread = Thread{};
    thread.id = t;
    thread.done = false;
    thread.known = nothing;
  }
  forget_collectives();
  begin_copies();
  begin_mbarriers();
  begin_wgmma();
  std::vector<int> turns = order;
  for (bool moved = true; moved;) {
    moved = false;
    if (shuffle) std::shuffle(turns.begin(), turns.end(), random);
    for (int t : turns) {
      if (threads[t].done || threads[t].waiting) continue;
      resume(threads[t]);
      moved = true;
      if (!error.empty()) return;
    }
    if (!moved) moved = deliver();  // delivers copies as late as possible, only when no thread can continue
  }
  for (int t = 0; t < block.threads; ++t) {
    if (!threads[t].done) {
      error = "block " + std::to_string(block.index) + ": " + standstill();
      return;
    }
  }
  for (const char* left : {left_in_block(), left_in_wgmma()}) {
    if (left != nullptr) error = "block " + std::to_string(block.index) + ": " + left;
  }
}

}  // namespace

void wait_at(const char* name, Where where) {
  current->at = name;
  current->where = where;
  current->waiting = true;
  yield();
}

std::string relative(const std::string& file) {
  for (const std::string_view prefix : {"./", SIMT_ROOT})  // addr2line prints ./FILE
    if (file.starts_with(prefix)) return file.substr(prefix.size());
  return file;
}

std::string text_of(Where where) { return relative(where.file_name()) + ":" + std::to_string(where.line()); }

void fail(const char* text) { fail(std::string(text)); }

void fail(const std::string& text) {
  error = "block " + std::to_string(block.index) + ", thread " + std::to_string(current->id) + ": " + text;
  yield();
  std::abort();  // not reached: the fibre of a failed launch is never resumed
}

void failf(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail(text);
}

const char* run(const void* function, int64_t blocks, int thread_count, int shared_bytes, void (*body)(void*),
                void* arguments) {
  static int launches = 0;
  static uint32_t serial = 0;
  static std::string last_error;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto refuse = [&](const std::string& text) { return (last_error = text).c_str(); };
  if (thread_count < 1 || thread_count > kMaxThreads) return refuse("a block has 1 to 1024 threads");
  const Kernel& called = kernel_at(function);
  if (called.shared_bytes + shared_bytes > gpu().shared_bytes) {
    return refuse(called.name + ": a block takes " + std::to_string(called.shared_bytes) +
                  " bytes of static and " + std::to_string(shared_bytes) +
                  " bytes of dynamic shared memory, and has at most " + std::to_string(gpu().shared_bytes) +
                  " bytes on a GPU of compute capability " + std::to_string(gpu().capability / 10) + "." +
                  std::to_string(gpu().capability % 10));
  }
  if (logged) log.push_back({called.name, called.file, thread_count, called.shared_bytes, shared_bytes});
  block.threads = thread_count;
  if (only_logged) return nullptr;
  if (stacks == nullptr) {
    stacks = static_cast<char*>(mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) return refuse("no memory for the threads' stacks");
  }
  if (serial > (1u << 29)) return refuse("too many blocks for one process");
  const int order = fixed_order >= 0 ? fixed_order : launches % 4;
  ++launches;
  std::mt19937 random(order);
  std::vector<int> turns(thread_count);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());

  const CaughtFaults faults;
  kernel = body;
  kernel_arguments = arguments;
  error.clear();
  std::vector<unsigned char> dynamic(shared_bytes + 2048);
  block.launch_first = serial + 1;
  block.blocks = blocks;
  block.threads = thread_count;
  block.shared_bytes = shared_bytes;
  // CUDA guarantees an alignment of 16 bytes only, so dynamic shared memory begins 16 bytes after a multiple
  // of 1024. On a GPU, shared memory as a whole begins at a multiple of 1024.
  block.dynamic = dynamic.data() + (1024 - reinterpret_cast<uintptr_t>(dynamic.data()) % 1024) + 16;
  std::vector<int64_t> block_order(order > 1 ? blocks : 0);
  std::iota(block_order.begin(), block_order.end(), 0);
  std::shuffle(block_order.begin(), block_order.end(), random);
  for (int64_t b = 0; b < blocks && error.empty(); ++b) {
    block.index = order > 1 ? block_order[b] : order == 1 ? blocks - 1 - b : b;
    block.serial = ++serial;
    run_block(turns, random, order > 1);
  }
  if (error.empty()) return nullptr;
  // After an error, fibres that have not finished are started from the beginning in the next launch.
  for (Fiber& fiber : fibers) fiber.started = false;
  last_error = error;
  return last_error.c_str();
}

namespace {
Launcher launcher = nullptr;
}  // namespace
void set_launcher(Launcher to) { launcher = to; }

const char* launch(const void* function, int64_t blocks, int thread_count, int shared_bytes, void* stream,
                   void (*body)(void*), void* arguments, size_t size) {
  if (launcher != nullptr)
    return launcher(function, blocks, thread_count, shared_bytes, stream, body, arguments, size);
  return run(function, blocks, thread_count, shared_bytes, body, arguments);
}

int last_threads() { return block.threads; }
void log_launches(bool on, bool only) { logged = on, only_logged = on && only; }
std::vector<Launch> take_launches() { return std::exchange(log, {}); }

void set_order(int order) { fixed_order = order; }

Index thread_index() { return {static_cast<unsigned>(current->id), 0, 0}; }
Index block_index() { return {static_cast<unsigned>(block.index), 0, 0}; }
Index block_size() { return {static_cast<unsigned>(block.threads), 1, 1}; }
Index grid_size() { return {static_cast<unsigned>(block.blocks), 1, 1}; }
unsigned char* dynamic_shared() { return block.dynamic; }

}  // namespace simt
