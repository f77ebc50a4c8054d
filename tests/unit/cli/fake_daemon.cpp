/// What `up` starts in its tests: answers daemon.info and daemon.stop on the socket it is
/// given, then ends.
///
///     fake_daemon --socket PATH WHAT
///
/// WHAT is `answers`, or how it dies before it answers: `config`, `running`, `crash`, `mute`.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <boost/json.hpp>

#include "tests/support/unix_socket.h"

namespace {

namespace json = boost::json;

/// One connection, until it closes. True when it said daemon.stop.
bool serve(int connection) {
    std::string buffer;
    for (char byte = 0; ::read(connection, &byte, 1) == 1;) {
        buffer += byte;
        if (byte != '\n') continue;
        const json::object request = json::parse(buffer).as_object();
        buffer.clear();
        const bool stop = request.at("method") == "daemon.stop";
        const json::value result =
            stop ? json::value{{"receipts", json::array{}}} : json::value{{"keeper_pid", ::getpid()}};
        const std::string line =
            json::serialize(json::object{{"jsonrpc", "2.0"}, {"id", request.at("id")}, {"result", result}}) + "\n";
        if (::write(connection, line.data(), line.size()) < 0 || stop) return stop;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const std::string what = std::string{argv[3]}.substr(std::string{argv[3]}.rfind('/') + 1);
    if (what == "config") {
        std::fputs("info: reading\nerror: config_invalid: fleet.yaml:1:1: bad; mend it\n", stderr);
        return 78;
    }
    if (what == "running") {
        std::fputs("error: already_running: starting: pid 1 uses it; end that one\n", stderr);
        return 1;
    }
    if (what == "mute") return 5;
    if (what == "crash") std::abort();

    std::signal(SIGPIPE, SIG_IGN);
    // Until it listens: a file there means that it answers.
    const std::string unheard = std::string{argv[2]} + "~";
    const bulkhead::UniqueFd listening = bulkhead::test::unix_listener(unheard);
    if (!listening || ::rename(unheard.c_str(), argv[2]) != 0) return 1;
    ::alarm(60);  // no test leaves it behind
    for (bool stopped = false; !stopped;)
        stopped = serve(bulkhead::UniqueFd{::accept(listening.get(), nullptr, nullptr)}.get());
    ::unlink(argv[2]);
    return 0;
}
