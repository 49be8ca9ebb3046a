#pragma once
// What belongs to a thread and must outlive its other thread-local objects: exit handlers and destructors of
// thread locals still call the driver. Freed when a thread ends, never for the main thread.

#include <unistd.h>

namespace gpupool::softgpu::api {

template <class T>
T& threadState() {
  struct Owner {
    T*& slot;
    ~Owner() {
      if (gettid() == getpid()) return;
      T* ended = slot;
      slot = nullptr;  // whoever comes later starts afresh
      delete ended;
    }
  };
  static thread_local T* state = nullptr;
  if (!state) {
    state = new T;
    static thread_local Owner owner{state};
    (void)owner;
  }
  return *state;
}

}  // namespace gpupool::softgpu::api
