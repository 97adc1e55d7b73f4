#pragma once

// The stacks in findings.

#include <memory>
#include <string>

namespace simdev {

struct CallStack;
using StackPtr = std::shared_ptr<const CallStack>;

/// Captures the calling thread's stack for the operation that the thread is about to add. It is separate from
/// taking the stack, so that it happens outside of locks.
void prepare_stack();
/// Returns the stack that prepare_stack() has captured on this thread, or a null pointer.
StackPtr prepared_stack();

/// Returns the lines of a stack: the functions of C++, and the lines of Python if they were captured.
std::string text_of(const StackPtr& stack);

/// Returns the Python stack of the calling thread, or an empty string if it runs no Python. Needs no GIL.
std::string python_stack();

}  // namespace simdev
