#include "server/front/membership.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "base/hmac.h"
#include "base/log.h"
#include "base/options.h"
#include "schema/convert.h"
#include "schema/fault.h"
#include "schema/manager_login.h"

namespace gpupool::server {

namespace {

std::vector<std::string> split(const std::string& list) {
  const auto addresses = options::commaSeparated(list);
  return addresses.empty() ? std::vector{list} : addresses;
}

void write(const std::vector<WorkerVersion>& versions, capnp::List<schema::WorkerVersion>::Builder out) {
  for (unsigned i = 0; i < out.size(); ++i) {
    out[i].setRowsHash(versions[i].rows);
    out[i].setRelease(versions[i].release);
  }
}

// A random one.
kj::Duration partOf(kj::Duration whole) {
  uint16_t part = 0;
  randomBytes(std::as_writable_bytes(std::span(&part, 1)));
  return whole * static_cast<int64_t>(part) / 65536;
}

}  // namespace

struct Membership::Link {
  kj::Own<kj::AsyncIoStream> stream;
  capnp::TwoPartyClient client;
  schema::Manager::Client manager;
  kj::Duration beat = 1 * kj::SECONDS;
  std::shared_ptr<const fabric::Fabric> fabric;  // this and workers: that the manager has
  std::vector<WorkerVersion> workers;

  explicit Link(kj::Own<kj::AsyncIoStream> connection)
      : stream(kj::mv(connection)), client(*stream), manager(client.bootstrap().castAs<schema::Manager>()) {}
};

Membership::Membership(kj::Network& network, kj::Timer& timer, Settings settings, Facts facts,
                       schema::ServerControl::Client control)
    : network_(network),
      timer_(timer),
      settings_(std::move(settings)),
      facts_(std::move(facts)),
      control_(kj::mv(control)),
      pause_(settings_.firstPause),
      addresses_(split(settings_.manager)),
      tasks_(*this) {
  tasks_.add(run());
}

Membership::~Membership() = default;

kj::Promise<void> Membership::run() {
  return connectAndServe()
      .catch_([this](kj::Exception&& exception) {
        if (leaving_) return;
        const bool was = joined_;
        report(exception, was);
        joined_ = false;
        at_ = (at_ + 1) % addresses_.size();
      })
      .then([this]() -> kj::Promise<void> {
        if (leaving_) return kj::READY_NOW;
        if (at_ != 0) return run();  // all of them, and then a pause
        const auto pause = pause_ + partOf(pause_) / 2;
        pause_ = std::min(pause_ * 2, settings_.longestPause);
        return timer_.afterDelay(pause).then([this] { return run(); });
      });
}

// Once a cause: the attempts go on.
void Membership::report(const kj::Exception& exception, bool was) {
  const schema::Fault fault = schema::faultOf(exception);
  std::string text = fault.text;
  if (fault.kind == schema::FaultKind::token || fault.kind == schema::FaultKind::version) {
    text += "; this server is in no pool";
  } else if (fault.remote) {
    text = "the pool manager at " + address() + " refuses this server: " + text;
  } else {
    text = "no pool manager at " + address() + ": " + text + "; sessions run on, retrying";
  }
  std::string& reported = reported_[address()];
  if (text != reported || was) GPUPOOL_WARNING("%s", text.c_str());
  reported = std::move(text);
}

kj::Promise<void> Membership::connectAndServe() {
  auto reached = schema::reachManager(network_, address(), settings_.credentials);
  return timer_.timeoutAfter(settings_.connectBound, kj::mv(reached))
      .then([this](schema::ManagerLink reached) {
        auto link = kj::heap<Link>(kj::mv(reached.stream));
        Link& current = *link;
        auto entered = timer_.timeoutAfter(settings_.connectBound, schema::logIn(current.manager, reached));
        auto served = entered.then([this, &current] { return join(current); }).then([this, &current] {
          return beats(current, partOf(current.beat));
        });
        auto lost = current.client.onDisconnect().then([]() -> kj::Promise<void> {
          return KJ_EXCEPTION(DISCONNECTED, "the manager closed the connection");
        });
        return served.exclusiveJoin(kj::mv(lost))
            .attach(kj::defer([this] { link_ = nullptr; }), kj::mv(link));
      });
}

kj::Promise<void> Membership::join(Link& link) {
  auto request = link.manager.joinRequest();
  facts_.describe(request);
  link.fabric = facts_.fabric();
  fabric::write(*link.fabric, request.getInfo().initFabric());
  link.workers = facts_.workers();
  write(link.workers, request.getInfo().initWorkers(static_cast<unsigned>(link.workers.size())));
  request.setControl(control_);
  return timer_.timeoutAfter(settings_.connectBound, request.send().then([this, &link](auto&& response) {
    link.beat = std::max<uint32_t>(response.getBeatMs(), 10) * kj::MILLISECONDS;
    link_ = &link;
    joined_ = true;
    reported_.clear();
    pause_ = settings_.firstPause;
    GPUPOOL_INFO("joined the pool manager at %s as %s", address().c_str(), facts_.name.c_str());
  }));
}

kj::Promise<bool> Membership::beat(Link& link) {
  auto request = link.manager.beatRequest();
  request.setName(facts_.name);
  schema::write(facts_.incarnation, request.initIncarnation());
  const auto leases = facts_.activeLeases();
  auto list = request.initActiveLeases(static_cast<unsigned>(leases.size()));
  for (unsigned i = 0; i < list.size(); ++i) schema::write(leases[i], list[i]);
  const auto suspended = facts_.suspended();
  auto away = request.initSuspended(static_cast<unsigned>(suspended.size()));
  for (unsigned i = 0; i < away.size(); ++i) {
    schema::write(suspended[i].first, away[i].initId());
    schema::writeKept(suspended[i].second, away[i]);
    if (const HeldFiles* held = facts_.held(suspended[i].first)) write(*held, away[i].initHeld());
  }
  facts_.turns(request);
  facts_.uses(request);
  facts_.counts(request);
  facts_.kept(request);
  const auto hindrances = facts_.hindrances(), protection = facts_.protection();
  const auto lent = facts_.lent();
  std::set<Id> said;
  for (const auto& [lease, text] : lent) said.insert(lease);
  for (const auto* one : {&hindrances, &protection})
    for (const auto& [lease, texts] : *one) said.insert(lease);
  auto hindered = request.initHindrances(static_cast<unsigned>(said.size()));
  unsigned at = 0;
  const auto put = [](const auto& all, const Id& lease, auto&& init) {
    const auto found = all.find(lease);
    if (found == all.end()) return;
    schema::write(found->second, init(static_cast<unsigned>(found->second.size())));
  };
  for (const Id& lease : said) {
    auto out = hindered[at++];
    schema::write(lease, out.initId());
    put(hindrances, lease, [&](unsigned count) { return out.initReasons(count); });
    put(protection, lease, [&](unsigned count) { return out.initProtection(count); });
    if (const auto found = lent.find(lease); found != lent.end()) out.setLentTo(found->second);
  }
  const auto problems = facts_.problems();
  schema::write(problems, request.initProblems(static_cast<unsigned>(problems.size())));
  request.setWarmWorkers(facts_.warmWorkers());
  if (const auto samples = facts_.samples(); !samples.empty()) {
    auto taken = request.initSamples(static_cast<unsigned>(samples.size()));
    for (unsigned i = 0; i < taken.size(); ++i) schema::write(samples[i], taken[i]);
  }
  if (auto now = facts_.fabric(); now != link.fabric) {
    fabric::write(*now, request.initFabric());
    link.fabric = std::move(now);  // a beat that fails ends the link, and the next one begins with a join
  }
  if (auto now = facts_.workers(); now != link.workers) {
    write(now, request.initWorkers(static_cast<unsigned>(now.size())));
    link.workers = std::move(now);
  }
  return timer_.timeoutAfter(kj::max(link.beat * settings_.beatPatience, settings_.leastPatience),
                             request.send().then([](auto&& response) { return response.getKnown(); }));
}

// The first beat follows the join at once: it tells a restarted manager which leases live on. The second one
// comes at a random moment (pause), for all servers join at once where the manager was away, and their beats
// would come together from then on.
kj::Promise<void> Membership::beats(Link& link, kj::Duration pause) {
  return beat(link)
      .then([this, &link](bool known) -> kj::Promise<void> {
        if (known || leaving_) return kj::READY_NOW;
        GPUPOOL_INFO("the pool manager does not know this server any more: joining again");
        return join(link);
      })
      .then([this, pause] { return timer_.afterDelay(pause); })
      .then([this, &link] { return beats(link, link.beat); });
}

kj::Promise<bool> Membership::beatNow(kj::Duration bound) {
  if (link_ == nullptr) return false;
  return timer_.timeoutAfter(bound, beat(*link_)).catch_([](kj::Exception&&) { return false; });
}

kj::Promise<void> Membership::leave() {
  leaving_ = true;
  if (link_ == nullptr) return kj::READY_NOW;
  auto request = link_->manager.leaveRequest();
  request.setName(facts_.name);
  schema::write(facts_.incarnation, request.initIncarnation());
  return timer_.timeoutAfter(settings_.leaveBound, request.send().ignoreResult())
      .catch_([](kj::Exception&& e) {
        GPUPOOL_WARNING("could not leave the pool manager in order: %s", e.getDescription().cStr());
      });
}

void Membership::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("membership: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
