#pragma once
// Opens sessions: the handshake on a fresh socket, and its hand-over to a worker.
//
// A holder may also come with questions alone (SessionHello.asks): it goes through the same proof.
//
//   holder -> SessionHello; server -> SessionChallenge (with its own proof); holder -> SessionProof;
//   server -> SessionAnswer. Then the socket is the worker's.
//
// Nothing from the socket is believed before the proof: messages are small (kMaxWords), each must arrive
// within `messageBound`, and a peer (a user of this host, or an address) that keeps failing is turned away
// for a while. Who has proven nothing yet has no claim to its place: of one peer `perPeer` handshakes run at
// a time and of all `atOnce`; one more displaces the oldest of that peer, or of the peer that has the most.
// So a slow or hostile peer costs another one nothing. While a lease is suspended, who has proven its key is
// told so, and to ask again. A session that moves comes with its next epoch, and goes to the worker that
// waits for it (SessionTable). A session's workers are of the program that its client's rows name
// (WorkerPools). A session that comes from another server is announced by that one, with the
// same proof; the connection becomes the state socket of the worker that waits for its client. Every refusal
// tells the peer why, as far as that helps nobody to guess. Belongs to the event loop's thread.

#include <kj/async-io.h>
#include <kj/io.h>

#include <functional>
#include <list>
#include <map>
#include <optional>
#include <string>

#include "base/rate_limit.h"
#include "schema/protocol.h"
#include "schema/session.capnp.h"
#include "server/front/checkpoint_desk.h"
#include "server/front/leases.h"
#include "server/front/sessions.h"
#include "server/front/standby.h"
#include "server/front/worker_pools.h"
#include "server/front/worker_starts.h"

namespace gpupool::server {

class Admission final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr uint64_t kMaxWords = 1024;  // 8 KiB a handshake message
  struct Settings {
    std::string server;  // ServerInfo.name
    schema::ProtocolRange protocols = schema::ownProtocols();
    WorkerStarts::Settings starts;
    // Called when a holder has proven its key and is told to ask again, since its lease is paused.
    std::function<void(const Id& lease)> told = [](const Id&) {};
    // A holder that has proven its key has questions and wants no session (SessionHello.asks).
    std::function<void(kj::Own<kj::AsyncIoStream> stream, const Id& lease)> asked =
        [](kj::Own<kj::AsyncIoStream>, const Id&) {};
    // Likewise, it keeps the checkpoints of the lease's sessions (SessionHello.keeps).
    std::function<void(kj::Own<kj::AsyncIoStream> stream, const Id& lease, AwayKeeper who)> keeps =
        [](kj::Own<kj::AsyncIoStream>, const Id&, const AwayKeeper&) {};
    // Likewise, it brings one of them (SessionHello.brings), whose bytes follow.
    std::function<void(kj::Own<kj::AsyncIoStream> stream, const BroughtSession& brought)> brings =
        [](kj::Own<kj::AsyncIoStream>, const BroughtSession&) {};
    // The key of a lease whose standby this server is; empty: it is not.
    std::function<std::vector<std::byte>(const Id& lease)> keptKey = [](const Id&) {
      return std::vector<std::byte>{};
    };
    // A holder that has proven such a key, or that of a lease on this server, asks for a session's checkpoint
    // (SessionHello.handsTo and over).
    std::function<void(kj::Own<kj::AsyncIoStream> stream, const HandWish& wish)> handed =
        [](kj::Own<kj::AsyncIoStream>, const HandWish&) {};
    // Keeper::failingOver.
    std::function<std::optional<std::string>(const SessionFacts& client)> failingOver =
        [](const SessionFacts&) { return std::nullopt; };
    kj::Duration messageBound = 2 * kj::SECONDS;
    kj::Duration workerBound = 20 * kj::SECONDS;
    uint32_t perPeer = 64;
    uint32_t atOnce = 512;
    uint32_t sessionsPerLease = 64;
    double failureBurst = 10;
    std::chrono::milliseconds failureInterval{1000};
  };

  Admission(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, WorkerPools& pool,
            Settings settings);
  ~Admission();
  KJ_DISALLOW_COPY(Admission);

  // A connection that came in. `peer` names who is counted for its failures ("uid 1000", "10.0.0.7").
  void admit(kj::Own<kj::AsyncIoStream> stream, std::string peer);
  // Refuses every new session from now on.
  void stop() { stopped_ = true; }
  size_t underWay() const { return underWay_; }
  // A session of the lease waits for a worker, or is about to have it.
  bool opening(const Id& lease) const { return proven_.contains(lease) || sessions_.arriving(lease) != 0; }
  const WorkerStarts& starts() const { return starts_; }

 private:
  struct Attempt;
  // A place among the unproven, at another's cost where there is none left.
  kj::Promise<void> takePlace(Attempt& attempt);
  void displace(const std::string& peer);
  const std::string& heaviest() const;
  void leavePlace(Attempt& attempt);
  kj::Promise<void> readHello(Attempt& attempt);
  kj::Promise<void> challenge(Attempt& attempt, schema::SessionHello::Reader hello);
  kj::Promise<void> readProof(Attempt& attempt);
  kj::Promise<void> begin(Attempt& attempt);
  kj::Promise<void> bringClient(Attempt& attempt);
  std::string judgeBrought(schema::SessionHello::Reader hello, uint64_t lastEpoch);
  kj::Promise<void> arrive(Attempt& attempt);
  kj::Promise<void> startCounted(Attempt& attempt);
  // Where the attempt's session is to begin: the lease's own placement, as it is now.
  void place(Attempt& attempt, const Grant& grant);
  // Why the lease has no session more; empty: it may.
  std::string crowded(const Id& lease) const;
  kj::Promise<kj::Own<WorkerChild>> takeWorker(const Attempt& attempt);
  kj::Promise<void> start(Attempt& attempt);
  kj::Promise<void> handOver(Attempt& attempt, kj::Own<WorkerChild> worker);
  kj::Promise<void> launch(Attempt& attempt, kj::Own<WorkerChild> worker);
  kj::Promise<void> replaceWorker(Attempt& attempt);
  struct Refusal {
    bool unknownLease = false, otherVersion = false;
  };
  kj::Promise<void> refuseChallenge(Attempt& attempt, const std::string& why, Refusal what);
  kj::Promise<void> answer(Attempt& attempt, const std::string& error, bool suspended = false);
  kj::Promise<void> answerPaused(Attempt& attempt, const Grant& grant);
  kj::Promise<void> send(Attempt& attempt, capnp::MessageBuilder& message);
  // Why this hello is refused; empty: it is not. First, and apart: for its version.
  std::string judgeVersion(schema::SessionHello::Reader hello) const;
  std::string judge(schema::SessionHello::Reader hello);
  static std::string judgeArrival(schema::SessionHello::Reader hello, uint64_t lastEpoch);
  void taskFailed(kj::Exception&& exception) override;

  kj::Timer& timer_;
  LeaseTable& leases_;
  SessionTable& sessions_;
  WorkerPools& pool_;
  Settings settings_;
  WorkerStarts starts_;
  FailureLimit limit_;
  std::list<Attempt*> unproven_;            // the oldest first
  std::map<std::string, uint32_t> places_;  // of unproven_, by peer
  std::map<Id, uint32_t> proven_;           // handshakes that wait for a worker, by lease
  size_t underWay_ = 0;
  bool stopped_ = false;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
