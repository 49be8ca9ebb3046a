// What is left where a part dies or stops while a session moves from one server to another.
#include "server/tests/departure_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

enum class Step { told, came, left };
enum class Part { oldWorker, newWorker, oldServer, newServer, client };

// A move up to a step, and the part that dies there.
struct Death : Pair {
  Opening one, two;
  kj::Promise<Migrated> order = nullptr;
  const Step step;
  const Part part;

  Death(Step at, Part who) : step(at), part(who) {
    one = session(1);
    const pid_t old = a->worker(one);
    order = migrate();
    REQUIRE(a->hear(one) == "moved 2");
    pid_t next = b->sessions.workers().at(0).pid;
    if (step != Step::told) {
      REQUIRE(come(two, 1) == "");
      CHECK(b->worker(two) == next);
    }
    if (step == Step::left) {
      CHECK(a->order(one, 'L').empty());
      CHECK(order.wait(io.waitScope).sessions == 1);
      Pair::isEmpty(*a);
    }
    if (part == Part::oldWorker) kill(old, SIGKILL);
    if (part == Part::newWorker) kill(next, SIGKILL);
    if (part == Part::newWorker) b->until([&] { return !alive(next) && b->known() == 0; });
    if (part == Part::oldServer) {
      order = nullptr;  // what is under way ends with the server
      die(a);
    }
    if (part == Part::newServer) die(b);
    if (part != Part::client) return;
    one.stream = nullptr;
    two.stream = nullptr;
  }
  // The client learns that there is nothing for it there.
  void stays() {
    a->say(one, 'S');
    CHECK(contains(a->fails(order), "could not reach the next worker"));
    CHECK(a->order(one, 'e') == "e01");
    CHECK(contains(a->order(one, 'q'), "client closed"));
    Pair::isEmpty(*a);
  }
  void livesThere() {
    CHECK(b->order(two, 'e') == "e10");
    CHECK(b->sessions.living(kLease) == 1);
    CHECK(contains(b->order(two, 'q'), "client closed"));
    Pair::isEmpty(*b);
  }
  void endsHere(const char* why) {
    CHECK(order.wait(io.waitScope).sessions == 0);
    CHECK(contains(a->endText(), why));
    Pair::isEmpty(*a);
  }
};

}  // namespace

TEST_CASE("a part dies when the client knows where to go, and has not gone") {
  {
    Death death(Step::told, Part::oldWorker);
    death.endsHere("killed by signal 9");
    CHECK(contains(death.a->hear(death.one), "killed by signal 9"));
    Pair::isEmpty(*death.b);
    Opening late;
    CHECK(contains(death.come(late, 1), "not known here"));
    CHECK(death.b->endTexts().size() == 1);  // isEmpty's own
  }
  {
    Death death(Step::told, Part::newWorker);
    CHECK(contains(death.come(death.two, 1), "not known here"));
    death.stays();
    Pair::isEmpty(*death.b);
  }
  {
    Death death(Step::told, Part::oldServer);
    CHECK(death.one.hear().wait(death.io.waitScope).empty());
    Pair::isEmpty(*death.b);
  }
  Death(Step::told, Part::newServer).stays();
  Death death(Step::told, Part::client);
  death.endsHere("client lost");
  Pair::isEmpty(*death.b);
}

TEST_CASE("a part dies when the client has come, and has not said so") {
  {
    Death death(Step::came, Part::oldWorker);
    death.endsHere("where its client may be");
    death.livesThere();
  }
  {
    Death death(Step::came, Part::newWorker);
    CHECK(contains(death.b->hear(death.two), "killed by signal 9"));
    death.stays();
    Pair::isEmpty(*death.b);
  }
  Death(Step::came, Part::oldServer).livesThere();
  Death(Step::came, Part::newServer).stays();
  Death death(Step::came, Part::client);
  death.endsHere("client lost");
  Pair::isEmpty(*death.b);
}

TEST_CASE("a part dies when the session has moved to the other server") {
  {
    Death death(Step::left, Part::newWorker);
    CHECK(contains(death.b->hear(death.two), "killed by signal 9"));
    CHECK(contains(death.b->endText(), "killed by signal 9"));
    Pair::isEmpty(*death.b);
  }
  Death(Step::left, Part::oldServer).livesThere();
  {
    Death death(Step::left, Part::newServer);
    CHECK(death.two.hear().wait(death.io.waitScope).empty());
    Pair::isEmpty(*death.a);
  }
  Death death(Step::left, Part::client);
  Pair::isEmpty(*death.b);
}

TEST_CASE("an old worker that dies of the order to go ends its session, and none comes") {
  Pair pair;
  Opening one = pair.session(1);
  pair.a->misbehave(one, '3');
  auto order = pair.migrate();
  CHECK(order.wait(pair.io.waitScope).sessions == 0);
  CHECK(contains(pair.a->hear(one), "killed by signal 6"));
  Pair::isEmpty(*pair.a);
  Pair::isEmpty(*pair.b);
}

TEST_CASE("a server that stops in the middle ends what it has, and the other one goes on") {
  Pair pair;
  Opening one = pair.session(1), two;
  auto order = pair.migrate();
  REQUIRE(pair.a->hear(one) == "moved 2");
  REQUIRE(pair.come(two, 1) == "");
  pair.b->worker(two);
  pair.a->admission.stop();
  pair.a->migration.stop();
  pair.a->sessions.endAll("the GPU server is shutting down").wait(pair.io.waitScope);
  CHECK(contains(pair.a->hear(one), "shutting down"));
  CHECK(pair.a->known() == 0);
  CHECK(pair.b->order(two, 'e') == "e10");
}
