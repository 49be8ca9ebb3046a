// Of a lease whose holder keeps the checkpoints: it takes them from where the lease is, and when a program
// has lost its server, it has the manager find another one, and brings the program's session there.
#include <capnp/message.h>
#include <capnp/serialize-async.h>

#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/options.h"
#include "pool-manager/cli/holder.h"
#include "pool-manager/convert.h"
#include "schema/convert.h"
#include "schema/fault.h"

namespace gpupool::cli {

using holder::Status;

// What its server says of it decides: it may be restoring the session by itself.
kj::Promise<OpenSession> Holder::recover(const SessionWish& wish) {
  if (!keeper_) return toException({Status::refused, "its checkpoints were with that server"});
  if (!lease_) return toException({Status::leaseEnded, "the lease has ended: " + lost_});
  const pool::ServerLife tried = lease_->server.life();
  auto opened = io_.getTimer().timeoutAfter(settings_.lookLimit, openAt({lease_->server}, wish));
  return lookAt(tried, wish, kj::mv(opened))
      .then([this, wish, tried](std::shared_ptr<Look> look) -> kj::Promise<OpenSession> {
        KJ_IF_MAYBE (session, look->session) return kj::mv(*session);
        if (!lease_) return toException({Status::leaseEnded, "the lease has ended: " + lost_});
        if (lease_->server.life() != tried) return bringBack(wish, "");
        KJ_IF_MAYBE (error, look->failure) {
          const OpenFailure failure = toFailure(*error);
          if (failure.status == Status::waiting) return kj::mv(*error);
          if (failure.status == Status::refused) return bringBack(wish, failure.text);
        }
        return failOver(tried).then([this, wish] { return bringBack(wish, ""); });
      });
}

// While the server says nothing, the manager is asked whether the lease may leave it already. What the server
// says meanwhile counts only if the lease stays: a session never begins at two servers.
kj::Promise<std::shared_ptr<Holder::Look>> Holder::lookAt(const pool::ServerLife& tried,
                                                          const SessionWish& wish,
                                                          kj::Promise<OpenSession> opened) {
  auto look = std::make_shared<Look>();
  look->transport = wish.transport;
  look->ranThere = wish.lost && wish.ranAt == tried;
  auto over = opened
                  .then([look](OpenSession&& session) { look->session = kj::mv(session); },
                        [look](kj::Exception&& error) { look->failure = kj::mv(error); })
                  .fork();
  return awaitLook(tried, look, kj::mv(over)).then([look] { return look; });
}

// Until the look is over, or the lease has left the server: then what that has said is dropped.
kj::Promise<void> Holder::awaitLook(const pool::ServerLife& tried, std::shared_ptr<Look> look,
                                    kj::ForkedPromise<void> over) {
  return over.addBranch()
      .exclusiveJoin(io_.getTimer().afterDelay(settings_.lookAlone))
      .then([this, look, end = over.addBranch()]() mutable -> kj::Promise<void> {
        if (look->over()) return kj::READY_NOW;
        return connect(0, "").catch_([](kj::Exception&&) {}).exclusiveJoin(kj::mv(end));
      })
      .then([this, tried, look]() -> kj::Promise<bool> {
        if (look->over()) return false;
        return leaveAtOnce(tried, false);
      })
      .then([this, tried, look](bool left) -> kj::Promise<bool> {
        if (left || look->over() || !look->ranThere) return left;
        return leaveIfCutOff(tried, look);
      })
      .then([this, tried, look, over = kj::mv(over)](bool left) mutable -> kj::Promise<void> {
        if (left) *look = {};
        if (left || look->over()) return kj::READY_NOW;
        return awaitLook(tried, look, kj::mv(over));
      });
}

// The manager has just said that it hears the server. One that is stopped or busy is only slow, but its host
// takes connections all the same: the kernel does. Where not even that is heard, behind all the time that the
// session has heard nothing, the network between here and there is cut. A session that did not run there has
// not heard nothing yet: then one packet that is lost, or a long way, would look the same.
kj::Promise<bool> Holder::leaveIfCutOff(const pool::ServerLife& tried, std::shared_ptr<Look> look) {
  if (!lease_ || lease_->server.life() != tried) return true;
  auto answered = std::make_shared<bool>(false);
  auto knock = kj::evalNow([&] { return connectServer(io_, lease_->server, look->transport); })
                   .then([answered](ServerConnection&&) { *answered = true; },
                         [answered](kj::Exception&&) { *answered = true; })  // which the look has met, too
                   .eagerlyEvaluate(nullptr);
  return io_.getTimer()
      .afterDelay(settings_.lookAlone)
      .then([] { return kj::evalLast([] {}); })  // this process may have had no time: the answer may be here
      .attach(kj::mv(knock))
      .then([this, tried, look, answered]() -> kj::Promise<bool> {
        if (*answered || look->over()) return false;
        return leaveAtOnce(tried, true);
      });
}

// cutOff: of Manager.failOver. False: the lease stays on that server, for certain.
kj::Promise<bool> Holder::leaveAtOnce(const pool::ServerLife& lost, bool cutOff) {
  if (!lease_ || lease_->server.life() != lost || !failOverSettled_) return true;
  if (connection_.get() == nullptr) return false;
  auto asked =
      requestFailOver(lost, 0, cutOff).then([this](FailedOver&& answer) { return noteFailOver(answer); });
  return io_.getTimer()
      .timeoutAfter(settings_.placesLimit, kj::mv(asked))
      .then([]() { return true; },
            [lost](kj::Exception&& error) {
              GPUPOOL_INFO("server %s says nothing; the lease does not leave it yet: %s", lost.name.c_str(),
                           pool::errorText(error).c_str());
              return !schema::faultOf(error).remote || error.getType() != kj::Exception::Type::FAILED;
            });
}

// why: what its server said instead of restoring it. What a standby has is later than what is kept here: it
// keeps them alone.
kj::Promise<OpenSession> Holder::bringBack(const SessionWish& wish, const std::string& why) {
  std::vector<pool::Server> keepers = keepersElsewhere();
  // What it has may be older than what others had: it comes last, and only where there is nothing else.
  if (keeper_ && lease_ && lease_->terms.standbyKeeps && formerStandby_ && !keeper_->has(wish.session))
    keepers.push_back(*formerStandby_);
  return haveHandedOn(keepers, wish).then([this, wish, why](bool handed) -> kj::Promise<OpenSession> {
    if (handed) return toException({Status::waiting, "its standby hands it on"});
    return bringOwn(wish, why);
  });
}

std::vector<pool::Server> Holder::keepersElsewhere() const {
  std::vector<pool::Server> keepers;
  if (!keeper_ || !lease_ || !lease_->terms.standbyKeeps) return keepers;
  if (lease_->server.keepBytes != 0) keepers.push_back(lease_->server);  // it may have been the standby
  if (lease_->standby && lease_->standby->name != lease_->server.name) keepers.push_back(*lease_->standby);
  return keepers;
}

kj::Promise<bool> Holder::haveHandedOn(std::vector<pool::Server> keepers, const SessionWish& wish) {
  if (keepers.empty() || !lease_) return false;
  const pool::Server keeper = keepers.front();
  keepers.erase(keepers.begin());
  return askKeeper(keeper, wish, false)
      .then(
          [this, wish, keepers, name = keeper.name](HandAnswer&& answer) -> kj::Promise<bool> {
            unanswered_.erase({wish.session, name});
            if (answer.verdict == schema::HandVerdict::NOTHING) return haveHandedOn(keepers, wish);
            if (!answer.error.empty())
              GPUPOOL_INFO("the session is not handed on yet: %s", answer.error.c_str());
            if (answer.verdict != schema::HandVerdict::OVER) return true;
            return toException({Status::serverLost, "it was brought to a server several times" +
                                                        (answer.error.empty() ? "" : ": " + answer.error)});
          },
          [this, wish, keepers, name = keeper.name](kj::Exception&& error) -> kj::Promise<bool> {
            const kj::TimePoint now = io_.getTimer().now();
            Silence& silence = unanswered_.try_emplace({wish.session, name}, Silence{now, now}).first->second;
            if (now - silence.asked > settings_.standbyLimit) silence.since = now;  // of an earlier failover
            silence.asked = now;
            GPUPOOL_INFO("server %s, which may have the session's checkpoint, does not answer: %s",
                         name.c_str(), toFailure(error).text.c_str());
            if (now - silence.since < settings_.standbyLimit) return true;
            return haveHandedOn(keepers, wish);
          });
}

// over: its program has ended.
kj::Promise<Holder::HandAnswer> Holder::askKeeper(const pool::Server& keeper, const SessionWish& wish,
                                                  bool over) {
  constexpr capnp::ReaderOptions kAnswers{.traversalLimitInWords = 512, .nestingLimit = 4};
  auto there = kj::heap<pool::Lease>(*lease_);
  there->server = keeper;
  auto opened = openWithout(io_, *there, wish.transport,
                            [&, to = lease_->server.incarnation](schema::SessionOpening& opening) {
                              opening.session = wish.session;
                              opening.epoch = wish.epoch;
                              opening.pid = wish.pid;
                              opening.command = wish.command;
                              if (wish.rowsHash != 0) opening.rowsHash = wish.rowsHash;
                              opening.over = over;
                              if (!over) opening.handsTo = to;
                            });
  auto answered = opened.then([kAnswers](kj::Own<kj::AsyncIoStream>&& stream) {
    auto message = capnp::readMessage(*stream, kAnswers);
    return message.attach(kj::mv(stream));
  });
  return io_.getTimer()
      .timeoutAfter(settings_.lookLimit, kj::mv(answered))
      .attach(kj::mv(there))
      .then(
          [](kj::Own<capnp::MessageReader> message) {
            const auto answer = message->getRoot<schema::HandAnswer>();
            return HandAnswer{answer.getVerdict(), schema::text(answer.getError()).substr(0, 300)};
          },
          [](kj::Exception&& error) -> HandAnswer {
            // It does not know the lease, and so keeps nothing of it.
            if (toFailure(error).status == Status::leaseEnded) return {};
            kj::throwFatalException(kj::mv(error));
          });
}

schema::CheckpointKeeper::Open Holder::openLease() const {
  return [this, lease = *lease_](const schema::CheckpointKeeper::Fill& fill) {
    return openWithout(io_, lease, settings_.transport, fill);
  };
}

kj::Promise<OpenSession> Holder::bringOwn(const SessionWish& wish, const std::string& why) {
  constexpr unsigned kMostTries = 3;  // what follows the checkpoint may be what ends its workers
  if (!lease_) return toException({Status::leaseEnded, "the lease has ended: " + lost_});
  if (keeper_->tries(wish.session) >= kMostTries) {
    const std::string last = keeper_->why(wish.session).empty() ? why : keeper_->why(wish.session);
    return toException({Status::serverLost, "it was brought to a server " + std::to_string(kMostTries) +
                                                " times" + (last.empty() ? "" : ": " + last)});
  }
  return kj::evalNow([&] {
           return keeper_->bring(openLease(), {wish.session, wish.epoch, wish.rowsHash, wish.pid,
                                               wish.command, wish.transport});
         })
      .then(
          []() -> kj::Promise<OpenSession> { return toException({Status::waiting, "it is being restored"}); },
          [](kj::Exception&& error) -> kj::Promise<OpenSession> {
            GPUPOOL_INFO("the session was not brought: %s", toFailure(error).text.c_str());
            return toException({Status::waiting, "it is brought again"});
          });
}

// One at a time, for all sessions.
kj::Promise<void> Holder::failOver(const pool::ServerLife& lost) {
  if (lease_ && lease_->server.life() != lost) return kj::READY_NOW;
  if (!failOverSettled_)
    KJ_IF_MAYBE (already, failingOver_) return already->addBranch();
  GPUPOOL_INFO("server %s is gone: another one is looked for", lost.name.c_str());
  const auto until = io_.getTimer().now() + settings_.failOverWaitMs * kj::MILLISECONDS;
  failOverSettled_ = false;
  auto telling = io_.getTimer().afterDelay(settings_.awaitedPause).then([this, name = lost.name] {
    onNews_("server " + name + " is gone: GPUs of another one are waited for (--protect-wait " +
            options::formatTime(std::chrono::milliseconds(settings_.failOverWaitMs)) + ")");
  });
  // In the fork itself: whoever asked first may be gone before the answer.
  auto fork = askFailOver(lost, until)
                  .attach(telling.eagerlyEvaluate(nullptr))
                  .then([this] { failOverSettled_ = true; },
                        [this](kj::Exception&& error) {
                          failOverSettled_ = true;
                          kj::throwFatalException(kj::mv(error));
                        })
                  .fork();
  auto branch = fork.addBranch();
  failingOver_ = kj::mv(fork);
  return branch;
}

kj::Promise<void> Holder::askFailOver(pool::ServerLife lost, kj::TimePoint until) {
  const kj::TimePoint now = io_.getTimer().now();
  const kj::Duration left = until > now ? until - now : 0 * kj::SECONDS;
  auto asked = connect(0, "").then([this, lost, left] {
    return requestFailOver(lost, kj::max(1u, static_cast<uint32_t>(left / kj::MILLISECONDS)), false);
  });
  return io_.getTimer()
      .timeoutAfter(left + 10 * kj::SECONDS, kj::mv(asked))
      .then([this](FailedOver&& answer) { return noteFailOver(answer); },
            [this, lost, until](kj::Exception&& error) -> kj::Promise<void> {
              const bool over = io_.getTimer().now() >= until;
              const bool answered = schema::faultOf(error).remote;
              // A manager that is being started again, or whose server is, is asked again.
              const bool again = !over && lease_ && error.getType() != kj::Exception::Type::FAILED &&
                                 error.getType() != kj::Exception::Type::UNIMPLEMENTED;
              if (!again)
                return toException({Status::serverLost, "it has no other server: " + pool::errorText(error)});
              if (!answered) connection_ = nullptr;
              return io_.getTimer().afterDelay(settings_.placesPause).then([this, lost, until] {
                return askFailOver(lost, until);
              });
            });
}

// waitMs, cutOff: of Manager.failOver.
kj::Promise<Holder::FailedOver> Holder::requestFailOver(const pool::ServerLife& lost, uint32_t waitMs,
                                                        bool cutOff) {
  auto request = manager().failOverRequest();
  pool::write(lease_ ? lease_->id : Id{}, request.initId());
  request.setServer(lost.name);
  pool::write(lost.incarnation, request.initIncarnation());
  request.setWaitMs(waitMs);
  request.setCutOff(cutOff);
  return request.send();
}

kj::Promise<void> Holder::noteFailOver(const FailedOver& answer) {
  if (!lease_) return toException({Status::leaseEnded, "the lease has ended: " + lost_});
  pool::Lease now = pool::read(answer.getLease());
  if (now.id != lease_->id) return toException({Status::internal, "the manager names another lease"});
  lease_ = std::move(now);
  GPUPOOL_INFO("the lease is on server %s now", lease_->server.name.c_str());
  if (keepAnew_.get() != nullptr) keepAnew_->fulfill();
  return kj::READY_NOW;
}

kj::Promise<void> Holder::keepLoop() {
  if (!lease_) return kj::READY_NOW;
  auto anew = kj::newPromiseAndFulfiller<void>();
  keepAnew_ = kj::mv(anew.fulfiller);
  auto anewFork = kj::mv(anew.promise);
  // While there is a standby, that one takes them.
  auto kept = kj::evalNow([&]() -> kj::Promise<void> {
                if (lease_->standby) return kj::NEVER_DONE;
                return keeper_->take(openLease());
              }).catch_([this](kj::Exception&& error) -> kj::Promise<void> {
    const OpenFailure failure = toFailure(error);
    GPUPOOL_INFO("checkpoints are not kept for now: %s", failure.text.c_str());
    auto paused = io_.getTimer().afterDelay(settings_.keepPause);
    if (failure.status != Status::leaseEnded || !lease_) return kj::mv(paused);
    // It may have moved; askPlaces notes where to.
    return places()
        .then([](std::vector<pool::Server>&&) {}, [](kj::Exception&&) {})
        .then([paused = kj::mv(paused)]() mutable { return kj::mv(paused); });
  });
  return kept.exclusiveJoin(kj::mv(anewFork)).then([this] { return keepLoop(); });
}

}  // namespace gpupool::cli
