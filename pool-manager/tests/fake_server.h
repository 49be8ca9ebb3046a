#pragma once
// A server of the pool inside a test: joins a manager, records what it is told, and opens sessions by the
// handshake of session.capnp, answering the first byte on a session's socket with "hello".

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <map>
#include <set>
#include <string>

#include "pool-manager/fabric.h"
#include "pool-manager/model.h"
#include "pool-manager/rpc.h"

namespace gpupool::test {

class FakeServer final : private kj::TaskSet::ErrorHandler {
 public:
  FakeServer(kj::AsyncIoContext& io, std::string name, uint32_t devices, const std::string& socketPath);
  ~FakeServer() noexcept {}

  pool::Server facts;
  std::map<Id, pool::Lease> leases;    // granted and not revoked
  std::vector<pool::TurnTerms> terms;  // of every grant
  std::vector<std::string> revokeReasons;
  std::map<Id, std::vector<uint64_t>> suspended;  // of those, the suspended ones, and what they keep
  std::vector<pool::LeaseTurn> turns;             // that it tells with each beat
  std::vector<pool::LeaseHindrances> hindrances;  // likewise
  std::vector<uint32_t> drains;                   // that it was told
  std::string refuseSuspend, refuseResume;        // not empty: fails with this
  bool muteSuspend = false;                       // never answers a suspend
  bool muteBeats = false;                         // is there, and says nothing
  bool oldServer = false;                         // knows neither, nor migrate
  std::string refuseMigrate;                      // not empty: fails with this
  bool muteMigrate = false;                       // never answers a migrate
  std::string refuseCheckpoint;                   // not empty: fails with this
  std::vector<std::string> checkpoints;           // orders to write a lease into files: the folders
  std::vector<uint32_t> migrations;               // orders to migrate: the drains that it was told
  std::vector<pool::Lease> movedTo;               // and their targets, of those that had one
  std::map<Id, pool::Lease> targets;              // other devices of leases that are here
  std::vector<bool> settles;                      // orders to settle: whether the lease had moved
  std::string refuseTargets, refuseSettle;        // not empty: addTarget, and settle(false), fail with this
  std::vector<Id> living;                         // the leases of the sessions that it says it has
  bool livingEnded = false;                       // they have ended lately
  uint32_t asked = 0;                             // for its sessions
  std::string refuseGrants;                       // not empty: every grant fails with this
  bool muteGrants = false;                        // answers no grant meanwhile
  Credentials credentials;                        // for a manager that wants a token
  bool muteRevokes = false;                       // never answers a revoke
  std::string refuseSessions;                     // not empty: who asks for one is told so
  bool muteSessions = false;                      // who asks for one is told nothing meanwhile
  unsigned cutsOff = 0;                           // so many handshakes end behind the challenge
  bool forgeProof = false;                        // does not know the session key
  uint64_t rowsHash = 0x1234;
  fabric::Fabric fabric;  // told when joining, and by the next beat if tellFabric
  bool tellFabric = false;
  std::vector<pool::DeviceReport> reports;  // told when joining
  uint32_t sessions = 0;
  bool sessionsSuspended = false;  // who proves the key is told that the lease is suspended
  uint32_t toldSuspended = 0;
  Id lastSession;  // that was proven
  uint64_t lastEpoch = 0;

  // Joins and beats, on a connection of its own, until leave(); comes back if the manager goes away.
  void join(const std::string& managerAddress);
  void disconnect();          // as if it had died
  kj::Promise<void> leave();  // as it ends well; it does not come back by itself
  kj::Promise<void> joined();
  kj::Promise<void> beatNow();

 private:
  class Control;
  kj::Promise<void> membership(const std::string& address);
  kj::Promise<void> beats();
  kj::Promise<void> accept();
  kj::Promise<void> session(kj::AsyncIoStream& stream);
  kj::Promise<void> speaks(const bool& mute);
  void taskFailed(kj::Exception&&) override {}

  kj::AsyncIoContext& io_;
  kj::Own<kj::ConnectionReceiver> listener_;
  kj::Own<pool::ManagerConnection> connection_;
  bool isJoined_ = false;
  kj::Own<kj::TaskSet> membership_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::test
