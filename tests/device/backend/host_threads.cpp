// The clocks of host threads. A thread that waits for a stream knows that the stream's operations are over.
// Another thread knows so only if something orders it after the first one. All locks of the process pass on
// what threads know: the thread that unlocks a mutex leaves its clock at the mutex, and the thread that locks
// the mutex takes it. Python's global lock is such a mutex, too. To see these calls in libraries that are
// already loaded, their tables of imported functions are changed to point here.

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "clocks.h"

namespace simdev {
namespace {

using Known = std::shared_ptr<const Clock>;  // never changes; a thread that learns gets a new one

std::atomic<bool> separate{false};

struct Shared {
  std::mutex mutex;
  std::unordered_map<const void*, Known> at;  // the key is the address of a mutex or the handle of a thread
};
constexpr size_t kShards = 64;
// The shards are never destroyed, since threads unlock mutexes until the process ends.
Shared& shard(const void* key) {
  static auto& all = *new std::array<Shared, kShards>;
  return all[reinterpret_cast<uintptr_t>(key) / 64 % kShards];
}

// The knowledge of all threads together, which counts until they are separated.
Shared& everybody() {
  static auto& one = *new Shared;
  return one;
}

struct OwnKnowledge {
  Known known;
  ~OwnKnowledge();
};
thread_local bool is_ending = false;  // mutexes are still used when the thread's objects have been destroyed
thread_local OwnKnowledge own;
OwnKnowledge::~OwnKnowledge() { is_ending = true; }

void learn(const Known& more) {
  if (more == nullptr || more == own.known) return;
  if (own.known == nullptr) {
    own.known = more;
    return;
  }
  Clock merged = *own.known;
  merge(merged, *more);
  if (merged == *own.known) return;
  own.known = merged == *more ? more : std::make_shared<const Clock>(merged);
}

void leave(const void* key) {
  if (!separate || is_ending || own.known == nullptr) return;
  Shared& s = shard(key);
  const std::lock_guard lock(s.mutex);
  s.at[key] = own.known;
}

void take(const void* key) {
  if (!separate || is_ending) return;
  Known found;
  {
    Shared& s = shard(key);
    const std::lock_guard lock(s.mutex);
    if (const auto at = s.at.find(key); at != s.at.end()) found = at->second;
  }
  learn(found);
}

int lock(pthread_mutex_t* mutex) {
  const int result = pthread_mutex_lock(mutex);
  if (result == 0) take(mutex);
  return result;
}
int try_lock(pthread_mutex_t* mutex) {
  const int result = pthread_mutex_trylock(mutex);
  if (result == 0) take(mutex);
  return result;
}
int unlock(pthread_mutex_t* mutex) {
  leave(mutex);
  return pthread_mutex_unlock(mutex);
}
// A wait unlocks and locks its mutex.
int wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  leave(mutex);
  const int result = pthread_cond_wait(condition, mutex);
  take(mutex);
  return result;
}
int timed_wait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  leave(mutex);
  const int result = pthread_cond_timedwait(condition, mutex, until);
  take(mutex);
  return result;
}
int clock_wait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock, const timespec* until) {
  leave(mutex);
  const int result = pthread_cond_clockwait(condition, mutex, clock, until);
  take(mutex);
  return result;
}

struct Start {
  void* (*run)(void*);
  void* argument;
  Known known;
};
void* begin(void* data) {
  const std::unique_ptr<Start> start(static_cast<Start*>(data));
  learn(start->known);
  void* result = start->run(start->argument);
  leave(reinterpret_cast<void*>(pthread_self()));
  return result;
}
int create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  auto start = std::make_unique<Start>(Start{run, argument, is_ending ? nullptr : own.known});
  const int result = pthread_create(thread, attributes, begin, start.get());
  if (result == 0) start.release();
  return result;
}
int join(pthread_t thread, void** value) {
  const int result = pthread_join(thread, value);
  if (result == 0) take(reinterpret_cast<void*>(thread));
  return result;
}

struct Replacement {
  const char* name;
  void* function;
};
template <class F>
Replacement replacement(const char* name, F* function) {
  return {name, reinterpret_cast<void*>(function)};
}

// Points the imported functions of one loaded library here.
int redirect(dl_phdr_info* info, size_t, void*) {
  static const Replacement kReplacements[] = {replacement("pthread_mutex_lock", lock),
                                              replacement("pthread_mutex_trylock", try_lock),
                                              replacement("pthread_mutex_unlock", unlock),
                                              replacement("pthread_cond_wait", wait),
                                              replacement("pthread_cond_timedwait", timed_wait),
                                              replacement("pthread_cond_clockwait", clock_wait),
                                              replacement("pthread_create", create),
                                              replacement("pthread_join", join)};
  const std::string name = info->dlpi_name;
  // This library and the C library call the functions themselves.
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&redirect), &self);
  if (reinterpret_cast<ElfW(Addr)>(self.dli_fbase) == info->dlpi_addr) return 0;
  for (const char* left : {"/libc.so", "/ld-linux", "linux-vdso"}) {
    if (name.find(left) != std::string::npos) return 0;
  }
  const ElfW(Sym)* symbols = nullptr;
  const char* strings = nullptr;
  const ElfW(Rela) * tables[2] = {};
  size_t sizes[2] = {};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    for (auto* d = reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
         d->d_tag != DT_NULL; ++d) {
      switch (d->d_tag) {
        case DT_SYMTAB:
          symbols = reinterpret_cast<const ElfW(Sym)*>(d->d_un.d_ptr);
          break;
        case DT_STRTAB:
          strings = reinterpret_cast<const char*>(d->d_un.d_ptr);
          break;
        case DT_RELA:
          tables[0] = reinterpret_cast<const ElfW(Rela)*>(d->d_un.d_ptr);
          break;
        case DT_RELASZ:
          sizes[0] = d->d_un.d_val;
          break;
        case DT_JMPREL:
          tables[1] = reinterpret_cast<const ElfW(Rela)*>(d->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          sizes[1] = d->d_un.d_val;
          break;
        default:
          break;
      }
    }
  }
  if (symbols == nullptr || strings == nullptr) return 0;
  for (int t = 0; t < 2; ++t) {
    for (size_t i = 0; i < sizes[t] / sizeof(ElfW(Rela)); ++i) {
      const auto& entry = tables[t][i];
      const auto type = ELF64_R_TYPE(entry.r_info);
      if (type != R_X86_64_GLOB_DAT && type != R_X86_64_JUMP_SLOT) continue;
      const char* imported = strings + symbols[ELF64_R_SYM(entry.r_info)].st_name;
      for (const Replacement& r : kReplacements) {
        if (std::strcmp(imported, r.name) != 0) continue;
        auto* slot = reinterpret_cast<void**>(info->dlpi_addr + entry.r_offset);
        void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / kPage * kPage);
        // The table may be read-only once the library is loaded. It stays writable, since other entries lie
        // in the same page.
        if (*slot != r.function && mprotect(page, kPage, PROT_READ | PROT_WRITE) == 0) *slot = r.function;
      }
    }
  }
  return 0;
}

}  // namespace

const Clock& known_to_host() {
  static const Clock kNothing{};
  if (is_ending) return kNothing;
  if (!separate) {
    Shared& all = everybody();
    const std::lock_guard lock(all.mutex);
    learn(all.at[nullptr]);
  }
  return own.known == nullptr ? kNothing : *own.known;
}

void host_learns(const Clock& clock) {
  if (is_ending) return;
  learn(std::make_shared<const Clock>(clock));
  if (separate) return;
  Shared& all = everybody();
  const std::lock_guard lock(all.mutex);
  learn(all.at[nullptr]);
  all.at[nullptr] = own.known;
}

void separate_host_threads() {
  dl_iterate_phdr(redirect, nullptr);
  separate = true;
}

}  // namespace simdev
