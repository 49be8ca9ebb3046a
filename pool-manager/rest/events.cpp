#include "pool-manager/rest/events.h"

#include <charconv>
#include <optional>

#include "pool-manager/lease_state.h"

namespace gpupool::pool::rest {
namespace {

constexpr kj::Duration kLook = 200 * kj::MILLISECONDS;
constexpr kj::Duration kForget = 5 * kj::SECONDS;    // nobody has looked for so long
constexpr kj::Duration kSilence = 10 * kj::SECONDS;  // a comment is sent: is the reader there still?
constexpr size_t kMostKept = 4096;

std::string stateOf(const Pool& pool, const std::string& name, const ServerRecord& server, uint64_t now) {
  const std::string state = pool.alive(server, now) ? "alive" : "lost";
  return state + (pool.cordons().contains(name) ? ", cordoned" : "");
}

}  // namespace

Answer Events::subscribe(const Request& request) {
  auto reader = std::make_shared<Reader>();
  reader->place = readers_.take(request.peer);
  reader->ofAll = all_.take("all hosts");
  if (reader->place == nullptr || reader->ofAll == nullptr)
    refuse({429, "too_many_streams", "too many streams of events are open",
            "close one, or read GET /v1/leases"});
  reader->who = request.who;
  look();
  reader->next = first_ + kept_.size();
  // The id of the last one that it was told, "LIFE-NUMBER".
  const std::string& last = request.lastEvent;
  if (last.starts_with(life_ + "-")) {
    const char* digits = last.data() + life_.size() + 1;
    uint64_t number = 0;
    std::from_chars(digits, last.data() + last.size(), number);
    if (number < reader->next) reader->next = number + 1;
  } else {
    reader->lost = !last.empty();
  }
  reader->told = timer_.now();
  reader->text = "retry: 2000\n\n";
  Answer answer;
  answer.stream = [this, reader](kj::AsyncOutputStream& out) { return tell(reader, out); };
  return answer;
}

kj::Promise<void> Events::tell(std::shared_ptr<Reader> reader, kj::AsyncOutputStream& out) {
  auto& text = reader->text;
  kj::Promise<void> written = kj::READY_NOW;
  if (!text.empty()) written = out.write(text.data(), text.size());
  return written.then([this]() { return timer_.afterDelay(kLook); })
      .then([this, reader, &out]() -> kj::Promise<void> {
        const TokenBook& tokens = service_.tokens();
        if (!tokens.endOf(reader->who).empty() || (reader->who.open && tokens.demanded()))
          return kj::READY_NOW;
        look();
        reader->text = newsFor(*reader);
        if (!reader->text.empty()) reader->told = timer_.now();
        if (timer_.now() - reader->told >= kSilence) {
          reader->text = ":\n\n";
          reader->told = timer_.now();
        }
        return tell(reader, out);
      });
}

std::string Events::newsFor(Reader& reader) {
  std::string news;
  const uint64_t end = first_ + kept_.size();
  if (reader.next < first_ || reader.next > end) {
    reader.lost = true;
    reader.next = end;
  }
  if (reader.lost) news += "event: gap\ndata: {\"do\":\"events were missed: read the lists again\"}\n\n";
  reader.lost = false;
  for (; reader.next != end; ++reader.next)
    news += render(kept_[reader.next - first_], reader.next, reader.who);
  return news;
}

// Others' leases are in use, as in Pool::list.
std::string Events::render(const Event& event, uint64_t number, const Principal& who) const {
  Json data = event.data;
  if (event.ofLease && !who.owns(event.tenant)) {
    data["tenant"] = data["reason"] = "";
    data["holder"] = "in use";
  }
  return "id: " + life_ + "-" + std::to_string(number) + "\nevent: " + event.kind +
         "\ndata: " + data.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n\n";
}

void Events::look() {
  const kj::TimePoint now = timer_.now();
  const bool begins = life_.empty() || now - looked_ > kForget;
  if (!begins && now - looked_ < kLook / 2) return;
  if (begins) {
    life_ = Id::random().text().substr(0, 8);
    first_ = 1;
    kept_.clear(), leases_.clear(), servers_.clear();
  }
  looked_ = now;
  compareLeases(!begins);
  compareServers(!begins);
}

void Events::add(Event event) {
  kept_.push_back(std::move(event));
  if (kept_.size() <= kMostKept) return;
  kept_.pop_front();
  ++first_;
}

void Events::addLease(const Id& id, const Known& lease, const std::string& was, const std::string& reason) {
  add({"lease",
       {{"id", id.text()},
        {"state", lease.state},
        {"was", was},
        {"server", lease.server},
        {"tenant", lease.tenant},
        {"holder", lease.holder},
        {"reason", reason}},
       lease.tenant,
       true});
}

void Events::compareLeases(bool tell) {
  const Pool& pool = service_.pool();
  for (const auto& [id, record] : pool.leases()) {
    Known& known = leases_[id];
    if (known.state == name(record.state)) continue;
    const std::string was = known.state;
    known = {std::string(name(record.state)), record.tenant, record.holder,
             record.isPlaced() ? record.server().name : ""};
    if (tell) addLease(id, known, was, record.reason);
  }
  std::erase_if(leases_, [&](const auto& one) {
    const auto& [id, known] = one;
    if (pool.leases().contains(id)) return false;
    const std::string* why = pool.endedBecause(id);
    if (tell)
      addLease(id, {"ended", known.tenant, known.holder, known.server}, known.state,
               why == nullptr ? "" : *why);
    return true;
  });
}

void Events::compareServers(bool tell) {
  const Pool& pool = service_.pool();
  std::map<std::string, std::string> now;
  for (const auto& [name, server] : pool.servers()) now[name] = stateOf(pool, name, server, service_.now());
  for (const auto& [name, cordon] : pool.cordons())
    if (!now.contains(name)) now[name] = "absent, cordoned";
  if (tell)
    for (const auto& [name, state] : now)
      if (const auto at = servers_.find(name); at == servers_.end() || at->second != state)
        add({"server",
             {{"name", name}, {"state", state}, {"was", at == servers_.end() ? "" : at->second}},
             "",
             false});
  for (const auto& [name, state] : servers_)
    if (tell && !now.contains(name))
      add({"server", {{"name", name}, {"state", "absent"}, {"was", state}}, "", false});
  servers_ = std::move(now);
}

}  // namespace gpupool::pool::rest
