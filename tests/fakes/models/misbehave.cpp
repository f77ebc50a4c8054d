#include "tests/fakes/models/misbehave.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#define EVIL_API extern "C" __attribute__((visibility("default")))

// An event to wait for; from inside the function that it names, which is then in every backtrace.
static void announce(const char* what) { std::fprintf(stderr, "evil: %s\n", what); }

// Named in backtraces: they are exported for that alone.
EVIL_API void evil_spin() {
    announce("spin");
    for (std::atomic<unsigned> turns = 0;;) ++turns;
}
EVIL_API void evil_deadlock() {
    announce("deadlock");
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&mutex);
    pthread_mutex_lock(&mutex);
}
EVIL_API void evil_leak() {
    announce("leak");
    constexpr std::size_t step = 1 << 20;
    while (void* const taken = std::malloc(step)) {
        volatile char* const pages = static_cast<char*>(taken);
        for (std::size_t at = 0; at < step; at += 4096) pages[at] = 1;
    }
}
EVIL_API void evil_abort() { std::abort(); }
EVIL_API void evil_segv() {
    volatile int* volatile nowhere = nullptr;
    *nowhere = 1;
}
EVIL_API int evil_recursion(int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : evil_recursion(depth + 1) + frame[0];
}
EVIL_API void evil_ignore_sigterm() {
    std::signal(SIGTERM, SIG_IGN);
    announce("ignore_sigterm");
    std::thread{[] {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        for (;;) pause();
    }}.detach();
    for (;;) pause();
}
EVIL_API void evil_setsid_child() {
    const pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork() != 0) _exit(0);
        std::fprintf(stderr, "evil: pid %d is the grandchild\n", static_cast<int>(getpid()));
        for (;;) pause();
    }
    if (child > 0) waitpid(child, nullptr, 0);
}

bool misbehave(std::string_view what) {
    if (what == "abort") evil_abort();
    if (what == "exit") std::exit(3);
    if (what == "segv") evil_segv();
    if (what == "stack_overflow") (void)evil_recursion(1);
    if (what == "loop" || what == "spin") evil_spin();
    if (what == "deadlock") evil_deadlock();
    if (what == "leak") evil_leak();
    if (what == "ignore_sigterm") evil_ignore_sigterm();
    if (what == "setsid_child") evil_setsid_child();
    if (what == "throw") {
        std::cerr << "Error: the evil model throws\n";  // as generated code does, which lets
                                                        // no exception out
        return false;
    }
    if (what == "print100mb") {
        const std::string line(999'999, 'x');
        for (int i = 0; i < 100; ++i) std::puts(line.c_str());
    }
    if (what == "print1gib") {
        std::string block;
        while (block.size() < (1u << 20) - 128)
            block += std::string("\x1b[31mred\0\a\r", 11) + std::string(100, 'x') + "\n";
        block.resize(1u << 20, '\n');
        for (int i = 0; i < 1024; ++i)
            for (std::size_t written = 0; written < block.size();) {
                const ssize_t count = write(2, block.data() + written, block.size() - written);
                if (count < 0) return false;
                written += static_cast<std::size_t>(count);
            }
    }
    return true;
}
