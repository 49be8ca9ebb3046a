// The holder, when an application waits: for its lease, for its turn, or until it is resumed or restored.
#include "holder_fixture.h"

using namespace gpupool;
using namespace gpupool::cli;
using namespace gpupool::pool;
using namespace gpupool::test;
using holder::OpenRequest;
using holder::Status;

TEST_CASE_METHOD(Fixture, "an application hears that its lease is waited for, and then gets it") {
  startAll();
  settings.waitingInterval = 20 * kj::MILLISECONDS;
  settings.request.deviceCount = 2;
  makeHolder();
  REQUIRE(open(request()).reply.status == Status::ok);
  auto first = kj::mv(holder);
  auto firstSocket = kj::mv(application);
  auto firstServing = kj::mv(serving);
  settings.request.waitMs = 60'000;
  makeHolder();
  const OpenRequest wanted = request();
  for (int heard = 0; heard < 3; ++heard) {
    Opened opened;
    if (heard == 0) opened = send(&wanted, sizeof wanted);
    for (int i = 0; i < 300 && !opened.answered; ++i) {
      pause(10);
      receive(opened);
    }
    REQUIRE(opened.answered);
    CHECK(opened.reply.status == Status::waiting);
  }
  first->release().wait(io.waitScope);
  Opened last;
  for (int i = 0; i < 300 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::ok);
  CHECK(last.session.get() >= 0);
  firstServing = nullptr;
}

TEST_CASE_METHOD(Fixture, "what a request waits for is said once, and nothing where it is served") {
  startAll();
  const auto makeTelling = [&] {
    return kj::heap<Holder>(
        *io.provider, io.unixEventPort, settings, [](const std::string&, bool) {},
        [&](const std::string& text) { news.push_back(text); });
  };
  settings.request.deviceCount = 2;
  settings.request.waitMs = 60'000;
  settings.awaitedPause = 20 * kj::MILLISECONDS;
  auto first = makeTelling();
  first->acquire().wait(io.waitScope);
  CHECK(news.empty());
  settings.request.holder = "waiter";
  auto second = makeTelling();
  auto acquired = second->acquire().eagerlyEvaluate(nullptr);
  for (int i = 0; i < 1000 && news.empty(); ++i) pause(10);
  pause(100);
  REQUIRE(news.size() == 1);
  CHECK(contains(news[0], "waiting (--wait 1m): 2 devices on one server are wanted, none is free"));
  CHECK(contains(news[0], "held by tester"));
  first->release().wait(io.waitScope);
  acquired.wait(io.waitScope);
  CHECK(news.size() == 1);
}

TEST_CASE_METHOD(Fixture,
                 "a protected session takes the network, and a chosen shm is said to be unprotected") {
  server->facts.host = "127.0.0.1";
  server->facts.port = 1;  // nobody is there
  startAll();
  const auto makeTelling = [&] {
    makeHolder();
    auto telling = kj::heap<Holder>(
        *io.provider, io.unixEventPort, settings, [](const std::string&, bool) {},
        [&](const std::string& text) { news.push_back(text); });
    telling->acquire().wait(io.waitScope);
    telling->release().wait(io.waitScope);
  };
  settings.request.turns.protectMs = 1000;
  SECTION("nobody has chosen a transport") {
    makeTelling();
    CHECK(news.empty());
    CHECK(contains(open(request()).reply.text, "127.0.0.1:1"));
  }
  SECTION("shm is chosen") {
    settings.transport = "shm";
    makeTelling();
    REQUIRE(news.size() == 1);
    CHECK(contains(news[0], "the lease is not protected: over --transport shm"));
    CHECK(open(request()).reply.status == Status::ok);
  }
  SECTION("nothing is protected") {
    settings.request.turns.protectMs = 0;
    makeTelling();
    CHECK(news.empty());
    CHECK(open(request()).reply.status == Status::ok);
  }
}

TEST_CASE_METHOD(Fixture,
                 "while the lease is suspended its server is asked again, and the application told") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  settings.waitingInterval = 50 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  Opened told = send(&wanted, sizeof wanted);
  REQUIRE(told.answered);
  CHECK(told.reply.status == Status::waiting);
  REQUIRE(holder->lease() != nullptr);
  CHECK(std::string(told.reply.text) ==
        "the lease is suspended; waiting until it is resumed (gpupool resume " + holder->lease()->id.text() +
            ")");
  // Far beyond sessionLimit, which is for one attempt.
  for (int i = 0; i < 1000 && server->toldSuspended < 40; ++i) pause(10);
  CHECK(server->toldSuspended >= 40);
  server->sessionsSuspended = false;
  Opened last;
  for (int i = 0; i < 1000 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::ok);
  CHECK(last.session.get() >= 0);
  CHECK(server->sessions == 1);
}

TEST_CASE_METHOD(Fixture, "a lease that takes turns may only wait for its turn, and asks often enough") {
  server->facts.overcommitPercent = 200;
  startAll();
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  const Opened told = send(&wanted, sizeof wanted);
  CHECK(told.reply.status == Status::waiting);
  REQUIRE(holder->lease() != nullptr);
  CHECK(
      std::string(told.reply.text) ==
      "the lease's memory is off its GPUs; waiting for its turn, or, if it is suspended, until it is resumed "
      "(gpupool resume " +
          holder->lease()->id.text() + ")");
  // In 250 ms for the first time, and then more and more rarely.
  const kj::Timer& timer = io.provider->getTimer();
  kj::TimePoint last = timer.now();
  const kj::TimePoint first = last;
  kj::Duration longest = 0 * kj::SECONDS;
  uint32_t asked = server->toldSuspended;
  while (server->toldSuspended < 9 && timer.now() < first + 60 * kj::SECONDS) {
    pause(10);
    if (server->toldSuspended == asked) continue;
    asked = server->toldSuspended;
    longest = kj::max(longest, timer.now() - last);
    last = timer.now();
  }
  CHECK(asked >= 9);
  CHECK(last - first > 3 * kj::SECONDS);  // 8 times 250 ms were 2 s
  CHECK(longest > 500 * kj::MILLISECONDS);
  server->sessionsSuspended = false;
  Opened opened;
  for (int i = 0; i < 1000 && (!opened.answered || opened.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(opened);
  }
  CHECK(opened.reply.status == Status::ok);
}

TEST_CASE_METHOD(Fixture, "an application that is gone is waited for no longer") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  REQUIRE(send(&wanted, sizeof wanted).answered);
  application = nullptr;
  serving.wait(io.waitScope);
  const uint32_t asked = server->toldSuspended;
  pause(200);
  CHECK(server->toldSuspended == asked);
}

TEST_CASE_METHOD(Fixture, "the held session of an application that is gone is taken when it is restored") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  const Opened first = open(request());
  REQUIRE(first.reply.status == Status::ok);
  server->sessionsSuspended = true;
  OpenRequest next = request();
  next.left = 1;
  next.sessionHigh = first.reply.sessionHigh;
  next.sessionLow = first.reply.sessionLow;
  next.epoch = 2;
  std::strcpy(next.transport, "shm");
  REQUIRE(open(next).reply.status == Status::waiting);
  application = nullptr;
  serving.wait(io.waitScope);  // its own holder would give the lease back now
  const uint32_t asked = server->toldSuspended;
  for (int i = 0; i < 1000 && server->toldSuspended < asked + 3; ++i) pause(10);
  CHECK(server->toldSuspended >= asked + 3);
  server->sessionsSuspended = false;
  for (int i = 0; i < 1000 && server->sessions < 2; ++i) pause(10);
  CHECK(server->sessions == 2);
  pause(200);
  CHECK(server->sessions == 2);  // once
}

TEST_CASE_METHOD(Fixture, "a suspended lease that ends is waited for no longer") {
  startAll();
  settings.suspendedPause = settings.mostSuspendedPause = 20 * kj::MILLISECONDS;
  makeHolder();
  server->sessionsSuspended = true;
  const OpenRequest wanted = request();
  REQUIRE(send(&wanted, sizeof wanted).answered);
  server->disconnect();
  pause(50);
  server->facts.incarnation = Id::random();  // restarted
  server->muteRevokes = true;                // and its sessions' door knows the lease still
  server->join(address);
  Opened last;
  for (int i = 0; i < 1000 && (!last.answered || last.reply.status == Status::waiting); ++i) {
    pause(10);
    receive(last);
  }
  CHECK(last.reply.status == Status::leaseEnded);
}
