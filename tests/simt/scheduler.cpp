// Threads as fibres: a thread runs until it has to wait for others, and the last one to arrive lets the others go on.

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

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
int fixed_order = [] {
  const char* text = std::getenv("SIMT_ORDER");
  return text ? std::atoi(text) : -1;
}();

struct Barrier {
  std::vector<int> waiting, arrived;  // threads
  std::vector<uint32_t> published;    // what those that arrived knew and had done by then; what they do later is not in it
  int count = 0;
};
Barrier barriers[16];
std::vector<int> reduced_values;
int reduced = 0;

// No call of setjmp may share a frame with anything that the optimiser keeps in a register.
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

void wait_at(const char* name, Where where) {
  current->at = name;
  current->where = where;
  current->waiting = true;
  yield();
}

// Who stands where, when nobody can go on.
std::string standstill() {
  std::map<std::string, std::vector<int>> places;
  for (int t = 0; t < block.threads; ++t) {
    const Thread& thread = threads[t];
    places[thread.done ? "have returned" : std::string("wait at ") + thread.at + " (" + text_of(thread.where) + ")"].push_back(t);
  }
  std::string text = "threads wait for others that never come:";
  for (const auto& [place, ids] : places) {
    text += " " + std::to_string(ids.size()) + " (the first is " + std::to_string(ids[0]) + ") " + place + ";";
  }
  text.pop_back();
  return text;
}

void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more) {
  for (size_t u = 0; u < more.size(); ++u) known[u] = std::max(known[u], more[u]);
}

// Everything that any of `ids` knows, and what they themselves have done, becomes known to all of them, and `published`.
void synchronise(const std::vector<int>& ids, const std::vector<uint32_t>& published = {}) {
  auto known = std::make_shared<std::vector<uint32_t>>(block.threads, 0);
  learn(*known, published);
  if (static_cast<int>(ids.size()) < block.threads) {
    const std::vector<uint32_t>* last = nullptr;
    for (int t : ids) {
      if (threads[t].known.get() != last) learn(*known, *threads[t].known);
      last = threads[t].known.get();
      for (int lane = 0; lane < 32 && t / 32 * 32 + lane < block.threads; ++lane) {
        uint32_t& k = (*known)[t / 32 * 32 + lane];
        k = std::max(k, threads[t].known_lanes[lane]);
      }
    }
  }
  for (int t : ids) (*known)[t] = threads[t].clock++;
  for (int t : ids) threads[t].known = known;
}

void arrive(int id, int count, const char* name, Where where) {
  if (id < 0 || id > 15) fail(std::string(name) + ": expected a barrier from 0 to 15, received " + std::to_string(id));
  const int expected = count == 0 ? block.threads : count;
  if (expected % 32 != 0 && expected != block.threads) {
    fail(std::string(name) + ": expected a count of threads that is a multiple of 32, received " + std::to_string(count));
  }
  Barrier& b = barriers[id];
  if (b.waiting.empty() && b.arrived.empty()) b.count = expected;
  if (b.count != expected) {
    fail(std::string(name) + ": others at barrier " + std::to_string(id) + " expect " + std::to_string(b.count) +
         " threads, this one " + std::to_string(expected));
  }
  if (std::count(b.arrived.begin(), b.arrived.end(), current->id) > 0) {
    fail(std::string(name) + " (" + text_of(where) + "): this thread has arrived at barrier " + std::to_string(id) +
         " already, and the barrier still waits for others");
  }
  if (count == 0 && !b.waiting.empty()) {
    const Thread& other = threads[b.waiting[0]];
    if (other.where.line() != where.line() || std::string(other.where.file_name()) != where.file_name()) {
      fail(std::string(name) + ": thread " + std::to_string(other.id) + " is at another one, " + text_of(other.where));
    }
  }
}

void complete(Barrier& b) {
  if (static_cast<int>(b.waiting.size() + b.arrived.size()) < b.count) return;
  synchronise(b.waiting, b.published);
  for (int t : b.waiting) threads[t].waiting = false;
  b = Barrier{};
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
  for (Barrier& b : barriers) b = Barrier{};
  reduced_values.clear();
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
  }
  for (int t = 0; t < block.threads; ++t) {
    if (!threads[t].done) {
      error = "block " + std::to_string(block.index) + ": " + standstill();
      return;
    }
  }
}

}  // namespace

std::string relative(const std::string& file) {
  return file.rfind(SIMT_ROOT, 0) == 0 ? file.substr(sizeof SIMT_ROOT - 1) : file;
}

std::string text_of(Where where) {
  return relative(where.file_name()) + ":" + std::to_string(where.line());
}

void fail(const char* text) { fail(std::string(text)); }

void fail(const std::string& text) {
  error = "block " + std::to_string(block.index) + ", thread " + std::to_string(current->id) + ": " + text;
  yield();
  std::abort();  // a failed launch is never resumed
}

void failf(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fail(text);
}

const char* run(int64_t blocks, int thread_count, int shared_bytes, void (*body)(void*), void* arguments) {
  static int launches = 0;
  static uint32_t serial = 0;
  static std::string last_error;
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto refuse = [&](const std::string& text) { return (last_error = text).c_str(); };
  if (thread_count < 1 || thread_count > kMaxThreads) return refuse("a block has 1 to 1024 threads");
  if (shared_bytes > 227 << 10) return refuse("a block has at most 227 KiB of shared memory");
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

  kernel = body;
  kernel_arguments = arguments;
  error.clear();
  std::vector<unsigned char> dynamic(shared_bytes + 64);
  block.launch_first = serial + 1;
  block.blocks = blocks;
  block.threads = thread_count;
  block.shared_bytes = shared_bytes;
  block.dynamic = dynamic.data() + (64 - reinterpret_cast<uintptr_t>(dynamic.data()) % 64);
  std::vector<int64_t> block_order(order > 1 ? blocks : 0);
  std::iota(block_order.begin(), block_order.end(), 0);
  std::shuffle(block_order.begin(), block_order.end(), random);
  for (int64_t b = 0; b < blocks && error.empty(); ++b) {
    block.index = order > 1 ? block_order[b] : order == 1 ? blocks - 1 - b : b;
    block.serial = ++serial;
    run_block(turns, random, order > 1);
  }
  if (error.empty()) return nullptr;
  for (Fiber& fiber : fibers) fiber.started = false;  // those that were left in the middle begin anew
  last_error = error;
  return last_error.c_str();
}

void set_order(int order) { fixed_order = order; }

Index thread_index() { return {static_cast<unsigned>(current->id), 0, 0}; }
Index block_index() { return {static_cast<unsigned>(block.index), 0, 0}; }
Index block_size() { return {static_cast<unsigned>(block.threads), 1, 1}; }
Index grid_size() { return {static_cast<unsigned>(block.blocks), 1, 1}; }
unsigned char* dynamic_shared() { return block.dynamic; }

void barrier(int id, int count, const char* name, Where where) {
  arrive(id, count, name, where);
  Barrier& b = barriers[id];
  Thread* self = current;
  self->where = where;
  b.waiting.push_back(self->id);
  self->waiting = true;
  complete(b);
  if (self->waiting) wait_at(name, where);
}

void barrier_arrive(int id, int count, const char* name, Where where) {
  arrive(id, count, name, where);
  Barrier& b = barriers[id];
  b.arrived.push_back(current->id);
  b.published.resize(block.threads);
  learn(b.published, *current->known);  // the own warp's lanes arrive themselves
  b.published[current->id] = current->clock++;
  complete(b);
}

int barrier_reduce(int value, int (*combine)(int, int), const char* name, Where where) {
  reduced_values.push_back(value);
  if (static_cast<int>(reduced_values.size()) == block.threads) {
    reduced = std::accumulate(reduced_values.begin() + 1, reduced_values.end(), reduced_values[0], combine);
    reduced_values.clear();
  }
  barrier(0, 0, name, where);
  // Nobody overwrites the result before the next such barrier, where this thread has to be as well.
  return reduced;
}

void check_source(const char* name, unsigned mask, int lane, Where where) {
  if (mask >> lane & 1) return;
  fail(std::string(name) + ": reads lane " + std::to_string(lane) + ", which is not in the mask (" + text_of(where) + ")");
}

void warp_collective(const char* name, unsigned mask, const void* in, void* out, Compute compute, bool orders_memory,
                     Where where) {
  Thread* self = current;
  const int lane = self->id % 32, first = self->id - lane;
  if ((mask >> lane & 1) == 0) fail(std::string(name) + ": the calling lane is not in the mask (" + text_of(where) + ")");
  bool all = true;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0 || l == lane) continue;
    const auto who = [&] { return std::string(name) + ": lane " + std::to_string(l) + " of the mask "; };
    if (first + l >= block.threads) fail(who() + "does not exist (" + text_of(where) + ")");
    const Thread& other = threads[first + l];
    if (other.done) fail(who() + "has returned (" + text_of(where) + ")");
    const bool here = other.waiting && other.mask == mask && std::strcmp(other.at, name) == 0;
    if (other.waiting && !here && other.mask >> lane & 1) {
      fail(who() + "waits for this one at " + other.at + " (" + text_of(other.where) + "), this one is at " + text_of(where));
    }
    all = all && here;
  }
  self->mask = mask;
  self->in = in;
  self->out = out;
  if (!all) {
    wait_at(name, where);
    return;
  }
  const void* inputs[32] = {};
  std::vector<int> ids;
  for (int l = 0; l < 32; ++l) {
    if (mask >> l & 1) {
      inputs[l] = threads[first + l].in;
      ids.push_back(first + l);
    }
  }
  for (int t : ids) compute(inputs, mask, t % 32, threads[t].out);
  if (orders_memory) {
    bool one_past = true;  // the same barriers behind them all: then only their own warp's clocks change
    for (int t : ids) one_past = one_past && threads[t].known == self->known;
    if (one_past) {
      uint32_t lanes[32] = {};
      for (int t : ids) {
        for (int l = 0; l < 32; ++l) lanes[l] = std::max(lanes[l], threads[t].known_lanes[l]);
      }
      for (int t : ids) lanes[t % 32] = threads[t].clock++;
      for (int t : ids) std::copy(lanes, lanes + 32, threads[t].known_lanes);
    } else {
      synchronise(ids);
    }
  }
  for (int t : ids) {
    threads[t].waiting = false;
    threads[t].mask = 0;
  }
}

}  // namespace simt
