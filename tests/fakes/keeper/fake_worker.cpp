/// A worker that does what the packets on its link say: `exit N`, `abort`, `print TEXT`, and, each
/// answered by a packet, `echo TEXT`, `threads` (three more, all waiting), `fork` and `setsid` (a
/// child that waits, in this process group or in a session of its own; the answer is its pid),
/// `leave` (the first thread ends, a second one goes on reading). Outlives its link, so that a test
/// sees who ends it.

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace {

constexpr int link_fd = 3;

void answer(const std::string& text) { ::send(link_fd, text.data(), text.size(), MSG_NOSIGNAL); }

void* wait_forever(void*) {
    for (;;) ::pause();
}

void start_thread(void* (*run)(void*)) {
    pthread_t thread{};
    if (::pthread_create(&thread, nullptr, run, nullptr) != 0) std::abort();
}

void fork_child(bool own_session) {
    int told[2];
    if (::pipe(told) != 0) std::abort();
    const pid_t child = ::fork();
    if (child == 0) {
        if (own_session) ::setsid();
        if (::write(told[1], "x", 1) != 1) std::abort();
        wait_forever(nullptr);
    }
    char word = 0;
    if (::read(told[0], &word, 1) != 1) std::abort();
    ::close(told[0]);
    ::close(told[1]);
    answer(std::to_string(child));
}

void* obey(void*) {
    for (;;) {
        char buffer[4096];
        const ssize_t size = ::recv(link_fd, buffer, sizeof buffer, 0);
        if (size <= 0) wait_forever(nullptr);
        const std::string command{buffer, static_cast<std::size_t>(size)};
        const std::size_t space = command.find(' ');
        const std::string verb = command.substr(0, space);
        const std::string rest = space == std::string::npos ? "" : command.substr(space + 1);
        if (verb == "exit") ::_exit(std::atoi(rest.c_str()));
        if (verb == "abort") std::abort();
        if (verb == "print" && ::write(STDOUT_FILENO, rest.data(), rest.size()) < 0) std::abort();
        if (verb == "echo") answer(rest);
        if (verb == "fork" || verb == "setsid") fork_child(verb == "setsid");
        if (verb == "threads") {
            for (int i = 0; i < 3; ++i) start_thread(wait_forever);
            answer("started");
        }
        if (verb == "leave") {
            start_thread(obey);
            answer("left");
            ::pthread_exit(nullptr);
        }
    }
}

}  // namespace

int main() { obey(nullptr); }
