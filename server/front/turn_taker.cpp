#include "server/front/turn_taker.h"

#include <algorithm>

#include "base/log.h"
#include "schema/convert.h"

namespace gpupool::server {
namespace {

constexpr size_t kMostNote = 200;  // a worker may say more, and each beat repeats it

Turns::Settings withMemory(Turns::Settings settings, const std::vector<Device>& devices) {
  settings.memory.clear();
  for (const Device& device : devices) settings.memory.push_back(device.memoryBytes);
  return settings;
}

Turns::Time milliseconds(kj::Duration duration) { return Turns::Time(duration / kj::MILLISECONDS); }

schema::TurnPlace place(const Turns::Report& report) {
  if (report.place == Turns::Place::resident) return schema::TurnPlace::RESIDENT;
  return report.wants ? schema::TurnPlace::WAITING : schema::TurnPlace::ASIDE;
}

}  // namespace

TurnTaker::TurnTaker(kj::Timer& timer, LeaseTable& leases, SessionTable& sessions, Suspension& suspension,
                     Settings settings)
    : timer_(timer),
      leases_(leases),
      sessions_(sessions),
      suspension_(suspension),
      settings_(std::move(settings)),
      turns_(withMemory(settings_.turns, leases.devices())),
      decided_(timer.now() - settings_.closest),
      stopped_(settings_.waits),
      tasks_(*this) {
  sessions_.onActivity([this] { plan(timer_.now()); });
  leases_.onWaitedFor([this](size_t device) { return turns_.waitedFor(device); });
}

TurnTaker::~TurnTaker() noexcept {
  sessions_.onActivity([] {});
  leases_.onWaitedFor([](size_t) { return false; });
}

void TurnTaker::asked(const Id& lease) {
  if (!leases_.contains(lease)) return;
  wantedUntil_.insert_or_assign(lease, timer_.now() + settings_.patience);
  plan(timer_.now());
}

void TurnTaker::begin() {
  stopped_ = false;
  plan(timer_.now());
}

Turns::Time TurnTaker::now() const { return milliseconds(timer_.now() - kj::origin<kj::TimePoint>()); }

void TurnTaker::plan(kj::TimePoint time) {
  time = std::max(time, decided_ + settings_.closest);
  if (stopped_ || (planned_ && *planned_ <= time)) return;
  planned_ = time;
  tasks_.add(timer_.atTime(time).then([this, time] {
    if (planned_ == time) decide();
  }));
}

void TurnTaker::decide() {
  planned_.reset();
  decided_ = timer_.now();
  if (stopped_) return;
  see();
  for (const Turns::Move& move : turns_.decide(now())) carryOut(move);
  if (turns_.waiting()) plan(decided_ + settings_.tick);
}

void TurnTaker::see() {
  std::erase_if(wantedUntil_, [this](const auto& entry) {
    return entry.second <= timer_.now() || !leases_.contains(entry.first);
  });
  std::map<Id, Turns::Facts> all;
  for (const auto& [id, lease] : leases_.all()) all.emplace(id, facts(lease));
  turns_.see(all, now());
}

Turns::Facts TurnTaker::facts(const Grant& lease) const {
  Turns::Facts facts;
  const bool away = lease.suspended && !lease.resuming;
  if (lease.closing || lease.paused != away) {
    facts.place = Turns::Place::moving;
  } else if (away) {
    facts.place = lease.aside ? Turns::Place::aside : Turns::Place::apart;
  }
  facts.wants = facts.place != Turns::Place::apart && !lease.closing && wants(lease);
  facts.sharePercent = lease.sharePercent;
  facts.priority = static_cast<int>(lease.priority);
  for (size_t place = 0; place < lease.devices.size(); ++place) {
    Turns::Part part{lease.devices[place].index, leases_.whole(lease.devices[place]),
                     leases_.left(lease, place)};
    if (lease.closing || facts.place == Turns::Place::apart)
      part.whole = part.left = leases_.reserved(lease, place);
    facts.parts.push_back(part);
  }
  return facts;
}

bool TurnTaker::wants(const Grant& lease) const {
  return wantedUntil_.contains(lease.id) || settings_.opening(lease.id) ||
         sessions_.active(lease.id, lease.suspended.has_value());
}

void TurnTaker::carryOut(const Turns::Move& move) {
  const kj::TimePoint began = timer_.now();
  auto task = move.back ? suspension_.bringBack(move.lease).then([] { return kj::Duration(); })
                        : suspension_.putAside(move.lease, static_cast<uint32_t>(move.drain.count()))
                              .then([](const Suspended& suspended) {
                                return static_cast<int64_t>(suspended.drainMs) * kj::MILLISECONDS;
                              });
  tasks_.add(task.then([this, move, began](kj::Duration waited) { done(move, began, waited); },
                       [this, move](kj::Exception&& exception) {
                         const std::string why = exception.getDescription().cStr();
                         turns_.failed(move.lease, why.substr(0, kMostNote), now());
                         plan(timer_.now());
                       }));
}

void TurnTaker::done(const Turns::Move& move, kj::TimePoint began, kj::Duration waited) {
  const kj::Duration took = timer_.now() - began;
  turns_.moved(move.lease, move.back, milliseconds(took - std::min(took, waited)));
  // Its holder is told to ask again for some time yet.
  if (const auto asked = wantedUntil_.find(move.lease); move.back && asked != wantedUntil_.end())
    asked->second = timer_.now() + settings_.patience;
  plan(timer_.now());
}

void TurnTaker::report(kj::Function<capnp::List<schema::LeaseTurn>::Builder(unsigned)> room) {
  see();
  std::vector<std::pair<const Grant*, Turns::Report>> reports;
  for (const auto& [id, lease] : leases_.all()) {
    const auto report = turns_.report(id);
    if (report && !lease.closing && report->place != Turns::Place::apart)
      reports.emplace_back(&lease, *report);
  }
  auto list = room(static_cast<unsigned>(reports.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    const auto& [lease, report] = reports[i];
    schema::write(lease->id, list[i].initId());
    list[i].setPlace(place(report));
    list[i].setServedMs(static_cast<uint64_t>(report.served.count()));
    list[i].setTurns(report.turns);
    list[i].setNote(report.note);
    schema::writeKept(lease->lastKept, list[i]);
  }
}

void TurnTaker::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("turns: %s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
