#pragma once
// This server's membership in the pool: it joins the manager, sends heartbeats, and joins again when the
// manager was unreachable.
//
// The manager is never needed for sessions that run: while it is away leases stay as they are, and nothing
// new is granted. Attempts to reach it are `firstPause` apart, doubling up to `longestPause`, with jitter, so
// that a hundred servers do not all return at once; nor do their beats come together. A beat without an
// answer within `beatPatience` beats, and `leastPatience`, means the connection is dead. Belongs to the event
// loop's thread.

#include <capnp/rpc-twoparty.h>
#include <kj/async-io.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/tokens.h"
#include "schema/device_sample.h"
#include "schema/fabric.h"
#include "schema/id.h"
#include "server/front/leases.h"
#include "server/front/worker_pools.h"

namespace gpupool::server {

class Membership final : private kj::TaskSet::ErrorHandler {
 public:
  struct Settings {
    // "unix:PATH" or "host:port"; several, joined by commas, are tried in turn
    std::string manager;
    CredentialSource credentials = [] { return Credentials{}; };  // shown to it
    kj::Duration connectBound = 5 * kj::SECONDS;
    kj::Duration firstPause = 200 * kj::MILLISECONDS, longestPause = 5 * kj::SECONDS;
    int beatPatience = 3;
    kj::Duration leastPatience = 2 * kj::SECONDS;
    kj::Duration leaveBound = 1 * kj::SECONDS;
  };
  // What each heartbeat reports; called for every one.
  struct Facts {
    std::string name;
    Id incarnation;
    std::function<void(schema::Manager::JoinParams::Builder)>
        describe;  // all but fabric, workers and control
    std::function<std::vector<Id>()> activeLeases;
    // Those of them that are suspended, and what each keeps on its devices.
    std::function<std::vector<std::pair<Id, std::vector<uint64_t>>>()> suspended;
    // Where such a lease is held; null: in no files.
    std::function<const HeldFiles*(const Id& lease)> held;
    // How leases take turns; writes nothing where they do not.
    std::function<void(schema::Manager::BeatParams::Builder)> turns =
        [](schema::Manager::BeatParams::Builder) {};
    // Of leases that have some: why their sessions could not be moved.
    std::function<std::map<Id, std::vector<std::string>>()> hindrances, protection;
    // Of leases that have been revoked and cannot be confirmed yet: who has memory of them still.
    std::function<std::map<Id, std::string>()> lent = [] { return std::map<Id, std::string>{}; };
    // How leases are used that end when they are not.
    std::function<void(schema::Manager::BeatParams::Builder)> uses =
        [](schema::Manager::BeatParams::Builder) {};
    // What the programs of leases have done.
    std::function<void(schema::Manager::BeatParams::Builder)> counts =
        [](schema::Manager::BeatParams::Builder) {};
    // Of which leases this server keeps the checkpoints.
    std::function<void(schema::Manager::BeatParams::Builder)> kept =
        [](schema::Manager::BeatParams::Builder) {};
    std::function<std::vector<std::string>()> problems;  // of each device
    std::function<uint32_t()> warmWorkers;
    // One of each device, or none.
    std::function<std::vector<DeviceSample>()> samples = [] { return std::vector<DeviceSample>{}; };
    // Sent again when it is another object.
    std::function<std::shared_ptr<const fabric::Fabric>()> fabric;
    // Of which versions there are workers. Sent again when they are others.
    std::function<std::vector<WorkerVersion>()> workers = [] { return std::vector<WorkerVersion>{}; };
  };

  // Starts trying at once.
  Membership(kj::Network& network, kj::Timer& timer, Settings settings, Facts facts,
             schema::ServerControl::Client control);
  ~Membership();
  KJ_DISALLOW_COPY(Membership);

  bool joined() const { return joined_; }
  // One beat more than the clock's, at once: false if there is no manager, or none that answers in that time.
  kj::Promise<bool> beatNow(kj::Duration bound);
  // Leaves the pool, if a manager is reachable, and stops trying to join.
  kj::Promise<void> leave();

 private:
  struct Link;
  kj::Promise<void> run();
  kj::Promise<void> connectAndServe();
  kj::Promise<void> join(Link& link);
  kj::Promise<void> beats(Link& link, kj::Duration pause);
  kj::Promise<bool> beat(Link& link);
  void report(const kj::Exception& exception, bool was);
  const std::string& address() const { return addresses_[at_]; }
  void taskFailed(kj::Exception&& exception) override;

  kj::Network& network_;
  kj::Timer& timer_;
  Settings settings_;
  Facts facts_;
  schema::ServerControl::Client control_;
  kj::Duration pause_;
  bool joined_ = false;
  std::vector<std::string> addresses_;           // of settings_.manager
  size_t at_ = 0;                                // the one that is tried, or has been joined
  std::map<std::string, std::string> reported_;  // by address: why it is not joined, as it was logged last
  bool leaving_ = false;
  Link* link_ = nullptr;  // owned by the promise of connectAndServe
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
