#pragma once
// Work on the slots of a ring that a few threads do beside the caller, whose results come in the order in
// which the work was given: so that the next bytes of a stream come or go while those before are checked and
// copied. What a slot is, the caller knows; no more is under way than there are slots.
//
//   while (more || !work.empty()) {
//     if (more && !work.full()) {
//       fill(slots[work.next()]);
//       work.give();
//     } else if (std::string why = work.await(); why.empty()) {
//       use(slots[work.oldest()]);
//       work.drop();
//     } else {
//       return why;
//     }
//   }
//
// All belongs to one thread, but for the work itself. Threads begin with what they are needed for. The
// caller's does work, while it would only wait, where there is one beside it or none: with more of them what
// it does besides, which nobody else can, would wait for that.

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace gpupool {

class OrderedWork {
 public:
  // What is to be done with that slot: "" or why it has failed; an exception counts as that, with its text.
  // Any thread; several slots at a time.
  using Work = std::function<std::string(size_t slot)>;
  // The same with one of the pieces that it was given with: several at a time. It is done when all are, and
  // of those that have failed the first one counts.
  using PieceWork = std::function<std::string(size_t slot, size_t piece)>;
  // As many threads as the machine has cores for beside the caller's, 1 to 12.
  static size_t helpers();

  OrderedWork(size_t slots, size_t threads, Work work);
  OrderedWork(size_t slots, size_t threads, PieceWork work);
  // What has not begun is never done; waits for what has.
  ~OrderedWork();
  OrderedWork(const OrderedWork&) = delete;
  OrderedWork& operator=(const OrderedWork&) = delete;

  bool full() const { return given_ - dropped_ == results_.size(); }
  bool empty() const { return given_ == dropped_; }
  // The slot that `give` hands over. It is the caller's until then; not while full.
  size_t next() const { return given_ % results_.size(); }
  void give(size_t pieces = 1);
  // Waits until the oldest one is done: its result. Not while empty.
  std::string await();
  // The oldest one's slot, which is the caller's behind `await`, until `drop` frees it.
  size_t oldest() const { return dropped_ % results_.size(); }
  void drop() { pieces_ -= results_[dropped_++ % results_.size()].pieces; }

 private:
  struct Result {
    size_t pieces = 1, begun = 0, ended = 0;
    size_t wrong = 0;  // the first piece that has failed, if there is a reason
    std::string why;
  };
  void help();
  void doNext(std::unique_lock<std::mutex>& lock);
  std::string doOne(size_t slot, size_t piece) const;

  const PieceWork work_;
  const size_t mostThreads_;
  uint64_t given_ = 0, dropped_ = 0;  // the caller's; given_ is written under the mutex
  size_t pieces_ = 0;                 // of what was given and not dropped; the caller's
  std::mutex mutex_;
  std::condition_variable more_, done_;
  uint64_t begun_ = 0;               // the slots of which all pieces have
  const Result* awaited_ = nullptr;  // by the caller
  bool ending_ = false;
  std::vector<Result> results_;
  std::vector<std::thread> threads_;
};

}  // namespace gpupool
