// Emulates barriers and the operations of a warp's lanes, such as shuffles. Both also update the vector
// clocks. A thread's vector clock says which accesses of other threads are known to be over.

#include <algorithm>
#include <cstring>
#include <numeric>

#include "internal.h"

namespace simt {
namespace {

struct Barrier {
  // ids of the threads that wait at the barrier, or arrived without waiting
  std::vector<int> waiting, arrived;
  // Vector clock of the threads that arrived without waiting, as of their arrival. Their later accesses are
  // not ordered by this barrier.
  std::vector<uint32_t> published;
  int count = 0;
};
Barrier barriers[16];
std::vector<int> reduced_values;
int reduced = 0;

// Merges the vector clocks of all threads in `ids` with their own clocks and with `published`, and gives the
// result to each of them.
void synchronise(const std::vector<int>& ids, const std::vector<uint32_t>& published = {}) {
  auto known = std::make_shared<std::vector<uint32_t>>(block.threads, 0);
  learn(*known, published);
  const std::vector<uint32_t>* last = nullptr;
  // If all threads of the block take part, each thread's own clock is the newest one that any thread knows of
  // it. So only the entries for mbarriers must be merged.
  const bool all = static_cast<int>(ids.size()) == block.threads;
  for (int t : ids) {
    if (threads[t].known.get() == last) continue;
    last = threads[t].known.get();
    if (!all || static_cast<int>(last->size()) > block.threads) learn(*known, *last);
  }
  for (int t : ids) {
    for (int lane = 0; !all && lane < 32 && t / 32 * 32 + lane < block.threads; ++lane) {
      uint32_t& k = (*known)[t / 32 * 32 + lane];
      k = std::max(k, threads[t].known_lanes[lane]);
    }
  }
  for (int t : ids) (*known)[t] = threads[t].clock++;
  for (int t : ids) threads[t].known = known;
}

void arrive(int id, int count, const char* name, Where where) {
  if (id < 0 || id > 15)
    fail(std::string(name) + ": expected a barrier from 0 to 15, received " + std::to_string(id));
  const int expected = count == 0 ? block.threads : count;
  if (expected % 32 != 0 && expected != block.threads) {
    fail(std::string(name) + ": expected a count of threads that is a multiple of 32, received " +
         std::to_string(count));
  }
  Barrier& b = barriers[id];
  if (b.waiting.empty() && b.arrived.empty()) b.count = expected;
  if (b.count != expected) {
    fail(std::string(name) + ": others at barrier " + std::to_string(id) + " expect " +
         std::to_string(b.count) + " threads, this one " + std::to_string(expected));
  }
  if (std::count(b.arrived.begin(), b.arrived.end(), current->id) > 0) {
    fail(std::string(name) + " (" + text_of(where) + "): this thread has arrived at barrier " +
         std::to_string(id) + " already, and the barrier still waits for others");
  }
  if (count == 0 && !b.waiting.empty()) {
    const Thread& other = threads[b.waiting[0]];
    if (other.where.line() != where.line() || std::string(other.where.file_name()) != where.file_name()) {
      fail(std::string(name) + ": thread " + std::to_string(other.id) + " is at another one, " +
           text_of(other.where));
    }
  }
}

void complete(Barrier& b) {
  if (static_cast<int>(b.waiting.size() + b.arrived.size()) < b.count) return;
  synchronise(b.waiting, b.published);
  for (int t : b.waiting) threads[t].waiting = false;
  b = Barrier{};
}

}  // namespace

void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& more) {
  if (known.size() < more.size()) known.resize(more.size());
  for (size_t u = 0; u < more.size(); ++u) known[u] = std::max(known[u], more[u]);
}

void learn_from(std::vector<uint32_t>& known, const Thread& thread) {
  learn(known, *thread.known);
  for (int lane = 0; lane < 32 && thread.id / 32 * 32 + lane < block.threads; ++lane) {
    uint32_t& k = known[thread.id / 32 * 32 + lane];
    k = std::max(k, thread.known_lanes[lane]);
  }
}

void forget_collectives() {
  for (Barrier& b : barriers) b = Barrier{};
  reduced_values.clear();
}

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
  // Each lane of the warp calls this function and publishes its own clock, so this call does not publish the
  // clocks of other lanes.
  learn(b.published, *current->known);
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
  // The variable `reduced` keeps its value until all threads, including this one, have called the next
  // reduction.
  return reduced;
}

void check_source(const char* name, unsigned mask, int lane, Where where) {
  if (mask >> lane & 1) return;
  fail(std::string(name) + ": reads lane " + std::to_string(lane) + ", which is not in the mask (" +
       text_of(where) + ")");
}

void warp_collective(const char* name, unsigned mask, const void* in, void* out, Compute compute,
                     bool orders_memory, Where where) {
  Thread* self = current;
  const int lane = self->id % 32, first = self->id - lane;
  if ((mask >> lane & 1) == 0)
    fail(std::string(name) + ": the calling lane is not in the mask (" + text_of(where) + ")");
  bool all = true;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1) == 0 || l == lane) continue;
    const auto who = [&] { return std::string(name) + ": lane " + std::to_string(l) + " of the mask "; };
    if (first + l >= block.threads) fail(who() + "does not exist (" + text_of(where) + ")");
    const Thread& other = threads[first + l];
    if (other.done) fail(who() + "has returned (" + text_of(where) + ")");
    const bool here = other.waiting && other.mask == mask && std::strcmp(other.at, name) == 0;
    if (other.waiting && !here && other.mask >> lane & 1) {
      fail(who() + "waits for this one at " + other.at + " (" + text_of(other.where) + "), this one is at " +
           text_of(where));
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
    // If all lanes of the mask know the same clocks from barriers of the block, only the clocks of lanes in
    // their warp must be merged.
    bool one_past = true;
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
