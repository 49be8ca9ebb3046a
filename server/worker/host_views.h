#pragma once
// The host memory every session has (HostPages), as each of its contexts sees it.
//
// A registration with the driver ends with the context that made it, whoever else uses the memory: what other
// contexts have queued then faults (H100, driver 580: CUDA_ERROR_LAUNCH_FAILED). So each context registers a
// mapping of its own of the same pages, its view, and its streams are given addresses of that view only: the
// end of a context concerns no other one, and nothing here waits for it. (The driver does: a reset returns
// when the kernels of the process's other contexts, on other devices too, have ended; that is so natively.)
// On an H100 a view takes 3 to 6 ms when its context is first used, beside the 100 ms of making the context.
//
// Threads: any. A view stays where it is until the session ends; when its context has ended, the next new
// context takes it.

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <set>

#include "server/driver.h"
#include "server/worker/warm.h"
#include "transports/transport.h"

namespace gpupool::server {

struct HostView {
  std::shared_ptr<transport::SharedMemory> staging, words;
  CUcontext context = nullptr;              // that registered it; null: it is free
  std::atomic<CUdeviceptr> deviceWords{0};  // where devices see `words`; 0: it could not be registered
};

class HostViews {
 public:
  HostViews(const Driver& driver, HostPages pages);
  // Takes the registrations back.
  ~HostViews();

  // This process's own mappings, whose addresses the client knows.
  const std::shared_ptr<transport::SharedMemory>& staging() const { return pages_.staging; }
  const std::shared_ptr<transport::SharedMemory>& words() const { return pages_.words; }

  // The context that was made, and had its view, ahead of the session; or null.
  CUcontext warmContext() const { return pages_.registeredIn; }
  // Such a context where there is none yet; before the session's first call, by the thread that serves it.
  void contextAhead(CUcontext context);

  // The session has this context, and nothing has been loaded in a new one: makes its view, and the first
  // copies between that and the device, in both directions. For those driver 580 takes 2 MiB of an address
  // pool that it places variables of code in: in a context that copies before it loads, a rebuilt session's
  // variables lay 2 MiB lower (two H100s in one host; with one it did not show).
  void contextMade(CUcontext context);
  // The view of `context`, which is current; made and registered at its first call. Null: this process can
  // map no more memory.
  const HostView* of(CUcontext context);
  // The context is gone, and with it the registrations that it made.
  void contextEnded(CUcontext context);

  // `host` as `view` has it, if it lies in the staging memory; else `host`.
  uint64_t translate(const HostView* view, uint64_t host) const;

 private:
  bool isFirst(CUcontext context);  // the first time
  CUresult copyFirst(const HostView& view);
  HostView* vacant();
  void registerIn(HostView& view, CUcontext context);

  const Driver& driver_;
  HostPages pages_;
  std::mutex mutex_;
  std::deque<HostView> views_;  // the first one is the pages themselves
  std::set<CUcontext> made_;
};

}  // namespace gpupool::server
