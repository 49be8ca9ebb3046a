#pragma once
// What tests of sessions that move have in common: the client's part in it, and the suspender's orders.

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "over_network.h"
#include "server/worker/suspender.h"
#include "server/worker/tests/client.h"
#include "server/worker/tests/connection.h"

namespace gpupool::server::test {

using namespace std::chrono_literals;

constexpr auto kLong = 20s;

inline Client::Wire overNetwork(Client::Wire inner) {
  return std::make_unique<transport::test::OverNetwork>(std::move(inner));
}

// The client's part in a move, on a thread of its own until it has been told what became of it, or the move
// has failed before it heard of it.
class Course {
 public:
  // stopped: called when it has said that it sends nothing more.
  // stepped: called when it is asked for one more frame.
  explicit Course(Client& client, NoticeType answer = NoticeType::left, std::function<void()> stopped = {},
                  std::function<void()> stepped = {})
      : client_(client),
        answer_(answer),
        stopped_(std::move(stopped)),
        stepped_(std::move(stepped)),
        thread_([this] { run(); }) {}
  ~Course() { thread_.join(); }
  // What comes from now on concerns it no more, unless it has been asked to stop.
  void isOver() { over_ = true; }
  // What kernels have printed, as it came; the move is over.
  std::string printed() {
    thread_.join();
    thread_ = std::thread([] {});
    return printed_;
  }

 private:
  template <class Body>
  void say(NoticeType type, const Body& body) {
    schema::ByteBuffer out;
    out.value(Notice{type, static_cast<uint32_t>(kEpoch), asked_});
    out.value(body);
    std::byte* room = client_.wire->reserve(Channel::control, out.span().size(), within(20000));
    if (room == nullptr) return;
    std::memcpy(room, out.span().data(), out.span().size());
    client_.wire->commit(Channel::control, out.span().size());
  }
  void run() {
    for (const auto end = std::chrono::steady_clock::now() + kLong; std::chrono::steady_clock::now() < end;) {
      const bool unheard = over_ && asked_ == 0;
      const auto message = client_.wire->receive(Channel::control, within(50));
      if (message.empty() && unheard) return;
      if (message.empty()) continue;
      if (message.size() < sizeof(Notice)) return;
      Notice header;
      std::memcpy(&header, message.data(), sizeof header);
      if (header.type == NoticeType::prepare) {
        asked_ = header.effect;
        say(NoticeType::stopped, schema::StoppedBody{client_.seq});
        if (stopped_) stopped_();
      } else if (header.type == NoticeType::step) {
        if (stepped_)
          stepped_();
        else
          std::this_thread::sleep_for(1ms);
        say(NoticeType::stopped, schema::StoppedBody{client_.seq});
      } else if (header.type == NoticeType::output) {
        printed_ += schema::Reader(message.subspan(sizeof header)).text();
      } else if (header.type == NoticeType::drained || header.type == NoticeType::drainedToShare) {
        say(NoticeType::quiet, schema::StoppedBody{client_.asides});
      } else if (header.type == NoticeType::moved) {
        say(answer_, uint64_t{0});
        if (answer_ == NoticeType::left) return;
      } else if (header.type == NoticeType::stay || header.type == NoticeType::failed) {
        return;
      }
    }
  }

  Client& client_;
  const NoticeType answer_;
  const std::function<void()> stopped_, stepped_;
  std::string printed_;
  std::atomic<bool> over_{false};
  uint64_t asked_ = 0;
  std::thread thread_;
};

class Mover {
 public:
  explicit Mover(Client& client, bool compares = false)
      : client_(client),
        suspender_(
            *client.session, [](const SuspendOutcome&) {},
            [this](const MoveOutcome& outcome) {
              if (reported_) reported_();
              {
                std::lock_guard lock(mutex_);
                outcome_ = outcome;
              }
              came_.notify_all();
            }) {
    if (compares) suspender_.compareContents();
  }
  // Called on the suspender's thread when the outcome is reported, as the server hears it.
  void whenReported(std::function<void()> call) { reported_ = std::move(call); }
  MoveOutcome move(int state, NoticeType answer = NoticeType::left) {
    Course course(client_, answer);
    begin(state);
    return over(course);
  }
  // To a worker of this server, which has the host memory; what is on the devices stays there.
  MoveOutcome moveHere(int copier, int state) {
    Course course(client_);
    suspender_.move(kLong, kEpoch + 1, copier, state, true);
    return over(course);
  }
  // Into a file; the client leaves.
  MoveOutcome hold(int state) {
    Course course(client_);
    suspender_.hold(kLong, kEpoch + 1, state);
    return over(course);
  }
  // The session goes on, so the client hears that it stays.
  MoveOutcome copy(int state) {
    const Course course(client_);
    suspender_.copy(kLong, state);
    return outcome();
  }
  MoveOutcome copyPages(int state) {
    const Course course(client_);
    suspender_.copyPages(kLong, state);
    return outcome();
  }
  // Both: with a Course of the caller's.
  void begin(int state, std::chrono::milliseconds drain = kLong) {
    suspender_.move(drain, kEpoch + 1, -1, state);
  }
  void beginCopy(int state, std::chrono::milliseconds drain = kLong) { suspender_.copy(drain, state); }
  void beginHold(int state) { suspender_.hold(kLong, kEpoch + 1, state); }
  void beginCopyPages(int state) { suspender_.copyPages(kLong, state); }
  // The server has died; its next life is here (Suspender).
  std::string apart() { return suspender_.apart(); }
  bool decided(bool held) { return suspender_.decided(held); }
  MoveOutcome outcome() {
    std::unique_lock lock(mutex_);
    REQUIRE(came_.wait_for(lock, 3 * kLong, [this] { return outcome_.has_value(); }));
    MoveOutcome outcome = std::move(*outcome_);
    outcome_.reset();
    return outcome;
  }

 private:
  MoveOutcome over(Course& course) {
    MoveOutcome came = outcome();
    course.isOver();
    return came;
  }

  Client& client_;
  std::mutex mutex_;
  std::condition_variable came_;
  std::optional<MoveOutcome> outcome_;
  std::function<void()> reported_;
  Suspender suspender_;  // ends first
};

}  // namespace gpupool::server::test
