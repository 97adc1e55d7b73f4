// Explains the failure of a collective: which ranks have ended, and which have issued another collective.

#include "distributed/failures.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace shoestring::distributed {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kKept = 32;  // collectives of a rank that are compared with those of the others
constexpr const char* kFailed = "failed";
constexpr const char* kLiving = "living";
constexpr const char* kOver = "over";  // the process that holds the store is about to end
const std::vector<uint8_t> kYes{1};
constexpr std::array<const char*, 9> kReductions{"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                 "BAND", "BOR", "BXOR",    "PREMUL_SUM"};

std::string heard(int64_t rank) { return c10::str("heard/", rank); }

std::string done(int64_t rank) { return c10::str("done/", rank); }

std::string ranks_of(const std::vector<int64_t>& ranks, const char* one, const char* several) {
  const bool is_one = ranks.size() == 1;
  return c10::str("; ", is_one ? "rank " : "ranks ", c10::Join(", ", ranks), is_one ? one : several);
}

std::string lost_store() {
  return c10::str("; ", agent_has_store() ? "torchrun's agent" : "rank 0",
                  ", which holds the store, has ended or is stopped");
}

// Waits until each of the ranks but rank 0 reads the store no more. Without this, a rank that reads from a
// store whose process has ended prints warnings of PyTorch.
void wait_for_readers(c10d::Store& store, std::vector<int64_t> ranks, Clock::time_point end) {
  while (true) {
    ranks.erase(std::remove_if(ranks.begin(), ranks.end(),
                               [&](int64_t rank) { return rank == 0 || store.check({done(rank)}); }),
                ranks.end());
    if (ranks.empty() || Clock::now() > end) return;
    std::this_thread::sleep_for(milliseconds(20));
  }
}

// The key and the text of the last collectives of a rank, by number.
using Last = std::map<int64_t, std::pair<uint32_t, std::string>>;

Last parse(const std::vector<uint8_t>& bytes) {
  std::istringstream lines(std::string(bytes.begin(), bytes.end()));
  Last last;
  int64_t number = 0;
  uint32_t key = 0;
  std::string text;
  while (lines >> number >> key && std::getline(lines >> std::ws, text)) last[number] = {key, text};
  return last;
}

// Returns the first collective that is not the same on all ranks that have issued it, or 0.
int64_t first_difference(const std::map<int64_t, Last>& ranks) {
  std::map<int64_t, uint32_t> keys;
  int64_t first = 0;
  for (const auto& [rank, last] : ranks) {
    for (const auto& [number, collective] : last) {
      const auto [known, is_new] = keys.emplace(number, collective.first);
      if (!is_new && known->second != collective.first && (first == 0 || number < first)) first = number;
    }
  }
  return first;
}

// Says at which collective each rank is: at the given one, or at its last if it has not come so far.
std::string places(const std::map<int64_t, Last>& ranks, int64_t number) {
  struct Place {
    std::pair<int64_t, uint32_t> key;
    std::string text;
    std::vector<int64_t> ranks;
  };
  std::vector<Place> groups;  // in the order of their first ranks
  for (const auto& [rank, last] : ranks) {
    Place place{{0, 0}, last.empty() ? "no collective" : "a later collective", {}};
    // Otherwise the rank is so far ahead that it has forgotten the collective, or is at none.
    if (const auto after = last.upper_bound(number); after != last.begin()) {
      const auto at = std::prev(after);
      place = {{at->first, at->second.first}, at->second.second, {}};
    }
    auto same =
        std::find_if(groups.begin(), groups.end(), [&](const Place& p) { return p.key == place.key; });
    if (same == groups.end()) same = groups.insert(groups.end(), std::move(place));
    same->ranks.push_back(rank);
  }
  if (groups.size() < 2) return "";
  std::string text;
  for (const Place& group : groups) text += ranks_of(group.ranks, " is at ", " are at ") + group.text;
  return text;
}

}  // namespace

uint32_t Collective::key() const {
  uint32_t hash = 2166136261U;  // FNV-1a, which is the same on all machines
  const auto add = [&](uint64_t value) {
    for (int i = 0; i < 8; ++i, value >>= 8) hash = (hash ^ (value & 0xff)) * 16777619U;
  };
  for (const char* c = name; *c != '\0'; ++c) add(static_cast<uint64_t>(*c));
  for (const auto value : {static_cast<int64_t>(tensors), static_cast<int64_t>(dtype), elements, root,
                           static_cast<int64_t>(reduction)})
    add(static_cast<uint64_t>(value));
  return hash;
}

std::string Collective::text() const {
  std::ostringstream text;
  if (number > 0) text << "collective " << number << ", ";
  text << name;
  if (root >= 0) text << " rank " << root;
  if (reduction != c10d::ReduceOp::SUM && reduction < kReductions.size())
    text << " (" << kReductions[reduction] << ")";
  if (tensors > 1) text << " of " << tensors << " tensors, first";
  if (tensors > 0) text << (tensors > 1 ? " " : " of ") << at::IntArrayRef(sizes) << " " << dtype;
  return text.str();
}

struct Listener::State {
  State(int64_t own_rank, int64_t ranks) : rank(own_rank), size(ranks) {}
  const int64_t rank, size;
  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false, asked = false, ended = false;
  std::string verdict;
  bool has_failed = false;             // this rank or another one
  std::vector<int64_t> living;         // after a failure
  std::array<Collective, kKept> last;  // collective `number` is at `number % kKept`
  int64_t count = 0;
};

Listener::Listener(c10d::Store& store, int64_t rank, int64_t size)
    : state_(std::make_shared<State>(rank, size)) {
  if (size > 1) thread_ = std::thread([state = state_, copy = store.clone()] { listen(*state, *copy); });
}

Listener::~Listener() { end(); }

void Listener::end() {
  if (!thread_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  // A store that does not answer must not keep the process from its end.
  const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return state_->ended; });
  lock.unlock();
  ended ? thread_.join() : thread_.detach();
}

void Listener::record(Collective& collective) {
  const std::lock_guard lock(state_->mutex);
  collective.number = ++state_->count;
  state_->last[static_cast<size_t>(collective.number) % kKept] = collective;
}

std::string Listener::verdict() {
  if (!thread_.joinable()) return "";
  std::unique_lock lock(state_->mutex);
  state_->asked = true;
  state_->changed.notify_all();
  const bool ended = state_->changed.wait_for(lock, milliseconds(1950), [&] { return state_->ended; });
  return ended ? state_->verdict : lost_store();
}

std::optional<std::string> Listener::failure() {
  const std::lock_guard lock(state_->mutex);
  return state_->ended && state_->has_failed ? std::optional(state_->verdict) : std::nullopt;
}

std::vector<int64_t> Listener::survivors(const char* caller) {
  std::unique_lock lock(state_->mutex);
  if (state_->asked) state_->changed.wait_for(lock, milliseconds(1950), [&] { return state_->ended; });
  TORCH_CHECK(state_->ended, caller,
              ": group: expected a group of which a collective has failed, received one ", "that works");
  const auto& living = state_->living;
  TORCH_CHECK(!living.empty(), caller, ": group: expected a store that answers", state_->verdict);
  TORCH_CHECK(std::count(living.begin(), living.end(), state_->rank) == 1, caller, ": group: rank ",
              state_->rank,
              " has not answered in time; the others go on without it. Let it join as a new process.");
  return living;
}

std::string Listener::rank() const { return c10::str("rank ", state_->rank, " of ", state_->size, ": "); }

void Listener::listen(State& state, c10d::Store& store) {
  std::unique_lock lock(state.mutex);
  try {
    while (true) {
      const bool is_own = state.asked, stop = state.stop;
      lock.unlock();
      bool is_end = true;
      if (is_own || (!stop && store.check({kFailed}))) {
        confer(state, store, is_own);
      } else if (stop) {
        leave(state, store);
      } else if (state.rank != 0 && store.check({kOver})) {
        store.set(done(state.rank), kYes);
        state.verdict = "; rank 0 has left the group";  // no other thread reads it before `ended`
      } else {
        is_end = false;
      }
      lock.lock();
      if (is_end) break;
      state.changed.wait_for(lock, milliseconds(250), [&] { return state.stop || state.asked; });
    }
  } catch (const std::exception&) {  // the process that holds the store has ended
    if (!lock.owns_lock()) lock.lock();
    state.verdict = lost_store();
  }
  state.ended = true;
  state.changed.notify_all();
}

// Lets the other ranks go on without this one.
void Listener::leave(State& state, c10d::Store& store) {
  if (agent_has_store()) return;
  if (state.rank != 0) return store.set(done(state.rank), kYes);
  store.set(kOver, kYes);
  std::vector<int64_t> ranks(static_cast<size_t>(state.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  wait_for_readers(store, std::move(ranks), Clock::now() + milliseconds(500));
}

// Publishes the last collectives of this rank, and compares them with those of the other ranks.
void Listener::confer(State& state, c10d::Store& store, bool is_own) {
  const auto begin = Clock::now();
  std::ostringstream collectives;
  {
    const std::lock_guard lock(state.mutex);
    state.has_failed = true;
    for (const Collective& collective : state.last)
      if (collective.number > 0)
        collectives << collective.number << " " << collective.key() << " " << collective.text() << "\n";
  }
  const std::string text = collectives.str() + "\n";
  store.set(heard(state.rank), std::vector<uint8_t>(text.begin(), text.end()));
  if (is_own) store.set(kFailed, kYes);

  std::map<int64_t, Last> ranks;
  std::vector<int64_t> absent, living;
  try {
    while (true) {
      absent.clear();
      for (int64_t rank = 0; rank < state.size; ++rank) {
        if (ranks.count(rank) == 0 && store.check({heard(rank)})) ranks[rank] = parse(store.get(heard(rank)));
        if (ranks.count(rank) == 0) absent.push_back(rank);
      }
      if (absent.empty() || Clock::now() - begin > milliseconds(1600)) break;
      std::this_thread::sleep_for(milliseconds(50));
    }
    // The rank that comes first decides for all.
    std::ostringstream list;
    for (const auto& [rank, last] : ranks) list << rank << " ";
    const std::string living_here = list.str();
    const auto agreed =
        store.compareSet(kLiving, {}, std::vector<uint8_t>(living_here.begin(), living_here.end()));
    std::istringstream numbers(std::string(agreed.begin(), agreed.end()));
    for (int64_t rank = 0; numbers >> rank;) living.push_back(rank);
    if (state.rank != 0 && !agent_has_store()) store.set(done(state.rank), kYes);
    if (state.rank == 0 && !agent_has_store()) {
      std::vector<int64_t> present;
      for (const auto& [rank, last] : ranks) present.push_back(rank);
      wait_for_readers(store, std::move(present), begin + milliseconds(1850));
    }
  } catch (const std::exception&) {
    // The process that holds the store has ended. Living ranks have answered by now, or it was too early.
    if (!absent.empty() && Clock::now() - begin < milliseconds(600)) throw;
  }
  const int64_t difference = first_difference(ranks);
  std::string verdict;
  if (difference > 0) {
    verdict = places(ranks, difference);
  } else if (absent.empty()) {
    verdict = places(ranks, INT64_MAX);
  }
  if (!absent.empty()) verdict += ranks_of(absent, " has ended or is stopped", " have ended or are stopped");
  const std::lock_guard lock(state.mutex);
  state.living = std::move(living);
  state.verdict = verdict.empty() ? "; all ranks are alive" : verdict;
}

std::string first_line(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
  text.resize(std::min(text.size(), text.find('\n')));
  // Gloo begins with "[file:line] ".
  const size_t end = text.rfind("[/", 0) == 0 ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

bool agent_has_store() {
  const char* text = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return text != nullptr && std::string(text) == "True";
}

}  // namespace shoestring::distributed
