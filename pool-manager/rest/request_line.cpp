#include "pool-manager/rest/request_line.h"

#include <arpa/inet.h>

#include <set>

#include "pool-manager/model.h"

namespace gpupool::pool::rest {
namespace {

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Of "%C3%A9"; what is no such text, or has a control character, is refused.
std::string decode(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      const int high = i + 2 < text.size() ? digit(text[i + 1]) : -1,
                low = i + 2 < text.size() ? digit(text[i + 2]) : -1;
      if (high < 0 || low < 0)
        refuse({400, "bad_address", "the address has a '%' without two hexadecimal digits"});
      c = static_cast<char>(high * 16 + low);
      i += 2;
    }
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)
      refuse({400, "bad_address", "the address has a control character"});
    out += c;
  }
  return out;
}

// Of "name:port", "[::1]:port" or either without a port.
std::string withoutPort(const std::string& host) {
  if (host.starts_with('[')) return host.substr(1, host.find(']') - 1);
  return host.substr(0, host.find(':'));
}

bool isAddress(const std::string& host) {
  in6_addr bytes;
  return inet_pton(AF_INET, host.c_str(), &bytes) == 1 || inet_pton(AF_INET6, host.c_str(), &bytes) == 1;
}

}  // namespace

void parseTarget(const std::string& target, Request& request) {
  if (!target.starts_with('/')) refuse({400, "bad_address", "the address does not begin with '/'"});
  const size_t mark = target.find('?');
  const std::string path = target.substr(1, mark == std::string::npos ? mark : mark - 1);
  for (size_t at = 0; at <= path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    request.path.push_back(decode(path.substr(at, end - at)));
    at = end + 1;
  }
  if (mark == std::string::npos) return;
  const std::string query = target.substr(mark + 1);
  for (size_t at = 0; at < query.size();) {
    const size_t end = std::min(query.find('&', at), query.size());
    const std::string pair = query.substr(at, end - at);
    const size_t equals = pair.find('=');
    const std::string name = decode(pair.substr(0, equals));
    const std::string value = equals == std::string::npos ? "" : decode(pair.substr(equals + 1));
    if (!request.query.emplace(name, value).second)
      refuse({400, "bad_parameter", "parameter '" + name + "' is given twice"});
    at = end + 1;
  }
}

Json parseBody(const std::string& text) {
  if (text.empty()) return Json::object();
  // Which of two members counts is up to who reads them: a proxy may have looked at the other one.
  std::vector<std::set<std::string>> seen;
  std::string twice;
  const auto note = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) seen.emplace_back();
    if (event == Json::parse_event_t::object_end) seen.pop_back();
    if (event == Json::parse_event_t::key && !seen.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  Json body = Json::parse(text, note, false);
  if (!twice.empty())
    refuse({400, "bad_json", "the request's body has the member '" + printable(twice, 64) + "' twice"});
  if (!body.is_object()) refuse({400, "bad_json", "the request's body is not a JSON object"});
  return body;
}

void demandSameOrigin(const std::string& origin, const std::string& host, bool tokens) {
  const char kHint[] = "use the address that the manager listens on";
  if (!origin.empty() && origin != "http://" + host && origin != "https://" + host)
    refuse({403, "cross_origin", "a page of another origin may not use this pool", kHint});
  const std::string name = withoutPort(host);
  if (!tokens && !name.empty() && name != "localhost" && !isAddress(name))
    refuse({403, "host_not_allowed", "without tokens the manager answers to addresses only, and 'localhost'",
            "use its IP address, or give it --tokens"});
}

}  // namespace gpupool::pool::rest
