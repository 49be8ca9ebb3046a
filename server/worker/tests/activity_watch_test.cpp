// What a session tells of its program's doings.
#include "server/worker/activity_watch.h"

#include <condition_variable>
#include <deque>

#include "server/worker/tests/client.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

namespace {

class WatchedActivity {
 public:
  explicit WatchedActivity(Session& session)
      : watch_(session, [this](Activity now) {
          {
            std::lock_guard lock(mutex_);
            told_.push_back(now);
          }
          came_.notify_all();
        }) {}
  Activity next() {
    std::unique_lock lock(mutex_);
    REQUIRE(came_.wait_for(lock, 20s, [this] { return !told_.empty(); }));
    const Activity first = told_.front();
    told_.pop_front();
    return first;
  }
  // A busy machine may have taken a program for quiet that was about to send more.
  Activity last() {
    Activity now = next();
    std::lock_guard lock(mutex_);
    if (!told_.empty()) now = told_.back();
    told_.clear();
    return now;
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Activity> told_;
  ActivityWatch watch_;
};

}  // namespace

TEST_CASE("a program that sends nothing is quiet, and busy with its next frame") {
  Client client;
  client.open();
  WatchedActivity watched(*client.session);
  CHECK(watched.last() == Activity::quiet);
  client.await(ROW("sessionDrain"), Arguments().value(0).value(1));
  CHECK(watched.next() == Activity::busy);
  CHECK(watched.next() == Activity::quiet);
}

TEST_CASE("while the gate is closed, a program waits as soon as it sends a frame") {
  Client client;
  client.open();
  WatchedActivity watched(*client.session);
  CHECK(watched.last() == Activity::quiet);
  FrameGate& gate = client.session->gate();
  gate.close();
  CHECK_FALSE(gate.awaitWanted(2 * ActivityWatch::kLook));
  client.post(ROW("sessionDrain"), Arguments().value(0).value(1));
  CHECK(watched.next() == Activity::waiting);
  CHECK(gate.empty());  // it stands outside
  gate.open();
  CHECK(watched.next() == Activity::busy);
  CHECK(watched.next() == Activity::quiet);
}

TEST_CASE("a frame that comes to the gate just as it opens does not wait for ever") {
  FrameGate gate;
  gate.close();
  CHECK_FALSE(gate.enter());
  gate.open();
  gate.awaitOpen(std::chrono::milliseconds(1));
  CHECK_FALSE(gate.awaitWanted(std::chrono::milliseconds(0)));
  CHECK(gate.enter());
}

TEST_CASE("the watch ends with the session, also while a frame waits") {
  Client client;
  client.open();
  {
    WatchedActivity watched(*client.session);
    client.session->gate().close();
    client.post(ROW("sessionDrain"), Arguments().value(0).value(1));
    while (watched.next() != Activity::waiting) {
    }
  }
  client.session->stop("the test ends it");
}
