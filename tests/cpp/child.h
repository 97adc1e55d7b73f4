#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include <ATen/Parallel.h>

/// Runs a task in a forked child process and returns the task's result. Returns -1 if the child is killed, or
/// takes more than 30 s.
template <class Task>
int in_child(Task&& task) {
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 99;
    try {
      // one thread, because the forked child does not inherit the OpenMP worker threads
      at::set_num_threads(1);
      status = task();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  for (int i = 0; i < 6000; ++i) {
    if (::waitpid(child, &status, WNOHANG) == child) return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return -1;
}
