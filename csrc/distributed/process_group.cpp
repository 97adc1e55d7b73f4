// Connects processes, and explains the failure of a collective.

#include <charconv>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <shoestring/distributed.h>

#include "distributed/backends.h"

namespace shoestring::distributed {
namespace {

using c10d::ProcessGroup;
using Clock = std::chrono::steady_clock;

constexpr const char* kInit = "init_process_group";

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  TORCH_CHECK(text != nullptr && *text != '\0', kInit, ": ", variable,
              ": expected the environment variable that torchrun sets, received none. Start the program with "
              "torchrun, or pass the option.");
  return text;
}

int64_t number_of(const std::optional<int64_t>& option, const char* variable, int64_t least, int64_t most) {
  const std::string text = option.has_value() ? std::to_string(*option) : text_of(variable);
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && value >= least && value <= most,
      kInit, ": ", variable, ": expected a number from ", least, " to ", most, ", received ", text);
  return value;
}

// Returns whether torchrun's agent hosts the store. Otherwise rank 0 does.
bool agent_has_store() {
  const char* text = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return text != nullptr && std::string(text) == "True";
}

std::string attempt() {
  const char* text = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return text == nullptr ? "0" : text;
}

// Returns the first line of an error.
std::string first_line(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  const std::string text = own != nullptr ? own->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

constexpr const char* kFailed = "failed";

// Gloo writes to the socket of a rank that has ended. Without this the signal would end the process, without
// a word.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

std::string heard(int64_t rank) { return c10::str("heard/", rank); }

std::string listens(int64_t rank) { return c10::str("listens/", rank); }

// Answers the other ranks, which ask whether this rank is alive after a collective has failed. A thread asks
// the store four times a second whether any rank has failed.
class Listener {
 public:
  Listener(c10d::Store& store, int64_t rank) {
    store.set(listens(rank), std::vector<uint8_t>{1});
    thread_ = std::thread([state = state_, own = store.clone(), rank] { listen(*state, *own, rank); });
  }
  ~Listener() {
    std::unique_lock lock(state_->mutex);
    state_->stop = true;
    state_->changed.notify_all();
    // A store that does not answer must not keep the process from its end.
    const bool ended = state_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return state_->ended; });
    lock.unlock();
    ended ? thread_.join() : thread_.detach();
  }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool stop = false, ended = false;
  };

  static void listen(State& state, c10d::Store& store, int64_t rank) {
    std::unique_lock lock(state.mutex);
    try {
      while (!state.stop) {
        lock.unlock();
        const bool failed = store.check({kFailed});
        if (failed) store.set(heard(rank), std::vector<uint8_t>{1});
        lock.lock();
        if (failed) break;
        state.changed.wait_for(lock, std::chrono::milliseconds(250), [&] { return state.stop; });
      }
    } catch (const std::exception&) {  // the process that holds the store has ended
      lock.lock();
    }
    state.ended = true;
    state.changed.notify_all();
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

// A process group with a Listener.
class Group : public ProcessGroup {
 public:
  Group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
      : ProcessGroup(store, rank, size), listener_(*store, rank) {}

 private:
  Listener listener_;
};

// Tells the other ranks that this rank has failed, and returns the ranks that do not answer within two
// seconds. A group of which no rank has a Listener gives no answer.
std::string absent_ranks(ProcessGroup& group) {
  const auto store = group.getStore();
  if (!store) return "";
  std::vector<int64_t> absent;
  try {
    const std::vector<uint8_t> yes{1};
    const bool all_listen = dynamic_cast<Group*>(&group) != nullptr;
    if (!all_listen && !store->check({listens(group.getRank())})) return "";
    store->set(heard(group.getRank()), yes);
    store->set(kFailed, yes);
    const auto end = Clock::now() + std::chrono::milliseconds(1800);
    do {
      absent.clear();
      for (int64_t rank = 0; rank < group.getSize(); ++rank) {
        if ((all_listen || store->check({listens(rank)})) && !store->check({heard(rank)}))
          absent.push_back(rank);
      }
      if (!absent.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    } while (!absent.empty() && Clock::now() < end);
  } catch (const std::exception&) {
    return "; rank 0, which holds the store, has ended";
  }
  if (absent.empty()) return "; all ranks are alive";
  const bool one = absent.size() == 1;
  return c10::str("; ", one ? "rank " : "ranks ", c10::Join(", ", absent),
                  one ? " has ended or is stopped" : " have ended or are stopped");
}

}  // namespace

GroupPtr init_process_group(const ProcessGroupOptions& options) {
  TORCH_CHECK_VALUE(options.backend() == "gloo", kInit, ": backend: expected \"gloo\", received \"",
                    options.backend(), "\"");
  TORCH_CHECK_VALUE(options.timeout().count() > 0, kInit, ": timeout: expected a time above 0, received ",
                    options.timeout().count(), " ms");
  const int64_t size = number_of(options.world_size(), "WORLD_SIZE", 1, INT32_MAX);
  const int64_t rank = number_of(options.rank(), "RANK", 0, size - 1);
  const std::string address = options.address().has_value() ? *options.address() : text_of("MASTER_ADDR");
  const int64_t port = number_of(options.port(), "MASTER_PORT", 1, 65535);
  ignore_broken_pipes();
  c10::intrusive_ptr<c10d::Store> store;
  try {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<uint16_t>(port);
    tcp.isServer = rank == 0 && !agent_has_store();
    tcp.numWorkers = static_cast<size_t>(size);
    tcp.waitWorkers = false;  // a late rank is waited for below, for as long as the timeout
    tcp.timeout = options.timeout();
    tcp.multiTenant = true;
    store = c10::make_intrusive<c10d::PrefixStore>("shoestring/" + attempt(),
                                                   c10::make_intrusive<c10d::TCPStore>(address, tcp));
    store->setTimeout(options.timeout());
  } catch (const std::exception& error) {
    TORCH_CHECK(false, kInit, ": rank ", rank, " of ", size, ": expected the store at ", address, ":", port,
                ", received ", first_line(error));
  }
  auto group = GroupPtr(c10::make_intrusive<Group>(store, static_cast<int>(rank), static_cast<int>(size)));
  try {
    group->setBackend(c10::DeviceType::CPU, ProcessGroup::BackendType::GLOO,
                      make_gloo(c10::make_intrusive<c10d::PrefixStore>("gloo", store), static_cast<int>(rank),
                                static_cast<int>(size), options.timeout()));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, kInit, ": rank ", rank, " of ", size, ": expected all ranks within ",
                options.timeout().count(), " ms, received ", first_line(error), absent_ranks(*group));
  }
  group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  group->setGroupName("shoestring");
  return group;
}

std::string registered_name(const GroupPtr& group) {
  static int64_t number = 0;
  const std::string name = group->hasBackends() ? group->getGroupName() : "";
  try {
    if (!name.empty() && c10d::resolve_process_group(name) == group) return name;
  } catch (const std::exception&) {  // no group has this name
  }
  const std::string own = c10::str("shoestring/", number++);
  c10d::register_process_group(own, group);
  return own;
}

void answer_failures(const GroupPtr& group) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<Listener>> listeners;
  if (dynamic_cast<Group*>(group.get()) != nullptr || !group->getStore()) return;
  const std::lock_guard lock(mutex);
  auto& listener = listeners[group->getGroupName()];
  if (listener == nullptr) listener = std::make_unique<Listener>(*group->getStore(), group->getRank());
}

void fail_collective(c10d::ProcessGroup& group, const std::exception& error, const std::string& what) {
  TORCH_CHECK(false, "rank ", group.getRank(), " of ", group.getSize(), ": ", what, ": ", first_line(error),
              absent_ranks(group));
}

void wait_for(const GroupPtr& group, const c10::intrusive_ptr<c10d::Work>& work, const std::string& what) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    fail_collective(*group, error, what);
  }
}

at::Tensor mean_over_ranks(const GroupPtr& group, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_floating_point(), "mean_over_ranks: tensor: expected a floating-point dtype, ",
                    "received ", tensor.scalar_type());
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sum{tensor.detach().clone(at::MemoryFormat::Contiguous)};
  wait_for(group, group->allreduce(sum), "mean_over_ranks");
  return sum[0].div_(group->getSize());
}

}  // namespace shoestring::distributed
