#include "ipc/slab/host_slab.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>

#include <gtest/gtest.h>

namespace bulkhead {
namespace {

using enum wire::SlabDirection;
constexpr std::uint64_t size_bytes = 64 * 1024;

UniqueFd copy_of(const HostSlab& slab) { return UniqueFd{::fcntl(slab.fd(), F_DUPFD_CLOEXEC, 0)}; }

UniqueFd plain_memfd(int seals) {
    UniqueFd fd{::memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
    EXPECT_EQ(::ftruncate(fd.get(), size_bytes), 0);
    EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
    return fd;
}

ErrorCode refusal(UniqueFd fd, wire::SlabDirection direction, std::uint64_t size = size_bytes) {
    return HostSlab::adopt(std::move(fd), size, direction).error().code;
}

/// The signal that ends a child which runs `body`; 0 when it ends by itself.
int signal_of_child(const std::function<void()>& body) {
    const pid_t child = ::fork();
    if (child == 0) {
        const rlimit no_core{0, 0};
        ::setrlimit(RLIMIT_CORE, &no_core);
        // Sanitizers handle them.
        for (const int number : {SIGSEGV, SIGBUS, SIGXFSZ}) ::signal(number, SIG_DFL);
        body();
        ::_exit(0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}

/// The lines of one mapping in /proc/self/smaps.
std::string smaps_of(const void* address) {
    char first[32];
    std::snprintf(first, sizeof first, "%lx-", reinterpret_cast<unsigned long>(address));
    std::ifstream smaps{"/proc/self/smaps"};
    std::string block, line;
    for (bool inside = false; std::getline(smaps, line);) {
        if (line.find(':') > line.find('-')) inside = line.starts_with(first);
        if (inside) block += line + "\n";
    }
    return block;
}

TEST(HostSlab, NobodyCanChangeItsSizeOrItsSeals) {
    for (const auto direction : {input, output}) {
        const HostSlab slab = HostSlab::create(size_bytes, direction, "test").value();

        EXPECT_EQ(::ftruncate(slab.fd(), 0), -1);
        EXPECT_EQ(errno, EPERM);
        EXPECT_EQ(::ftruncate(slab.fd(), size_bytes * 2), -1);
        EXPECT_EQ(errno, EPERM);
        EXPECT_EQ(::fcntl(slab.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
        EXPECT_EQ(errno, EPERM);
    }
}

TEST(HostSlab, OnlyTheWorkerCanWriteAnOutputSlab) {
    const HostSlab worker = HostSlab::create(size_bytes, output, "test").value();
    const HostSlab client = HostSlab::adopt(copy_of(worker), size_bytes, output).value();

    worker.bytes()[0] = std::byte{7};

    EXPECT_EQ(client.bytes()[0], std::byte{7});
    EXPECT_EQ(::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client.fd(), 0), MAP_FAILED);
    EXPECT_EQ(::mprotect(client.bytes().data(), size_bytes, PROT_READ | PROT_WRITE), -1);
    EXPECT_EQ(::pwrite(client.fd(), "x", 1, 0), -1);
    EXPECT_EQ(signal_of_child([&] {
                  const HostSlab its = HostSlab::adopt(copy_of(worker), size_bytes, output).value();
                  *reinterpret_cast<volatile char*>(its.bytes().data()) = 1;
              }),
              SIGSEGV);
}

TEST(HostSlab, IsResidentAndKeptOutOfCoreDumps) {
    const HostSlab worker = HostSlab::create(size_bytes, output, "test").value();
    const HostSlab client = HostSlab::adopt(copy_of(worker), size_bytes, output).value();

    for (const HostSlab* slab : {&worker, &client}) {
        const std::string smaps = smaps_of(slab->bytes().data());
        EXPECT_NE(smaps.find("Rss:                  64 kB"), std::string::npos) << smaps;
        EXPECT_NE(smaps.find(" dd "), std::string::npos) << smaps;
    }
    EXPECT_NE(smaps_of(client.bytes().data()).find(" dc "), std::string::npos) << "and out of a client's forks";
}

TEST(HostSlab, ItsLabelShowsInTheMapsOfWhoeverHoldsIt) {
    const std::string label = slab_owner_prefix("token", "minilm", 0, 3) + "1:in";
    const HostSlab slab = HostSlab::create(size_bytes, input, label).value();

    EXPECT_EQ(label, "bulkhead:token:minilm/0#3:1:in");
    EXPECT_NE(smaps_of(slab.bytes().data()).find("/memfd:" + label), std::string::npos);
}

TEST(HostSlab, OnlyAMemfdSealedAsDocumentedIsAdopted) {
    constexpr auto refused = ErrorCode::protocol_violation;
    EXPECT_EQ(refusal(plain_memfd(0), input), refused);
    EXPECT_EQ(refusal(plain_memfd(F_SEAL_GROW | F_SEAL_SEAL), input), refused) << "it could shrink";
    EXPECT_EQ(refusal(plain_memfd(F_SEAL_SHRINK | F_SEAL_GROW), input), refused);

    const HostSlab in = HostSlab::create(size_bytes, input, "in").value();
    const HostSlab out = HostSlab::create(size_bytes, output, "out").value();
    EXPECT_EQ(refusal(copy_of(in), output), refused) << "the client could write it";
    EXPECT_EQ(refusal(copy_of(out), input), refused) << "the client could not write it";
    for (const std::uint64_t size : {size_bytes + 1, size_bytes - 1, std::uint64_t{0}})
        EXPECT_EQ(refusal(copy_of(in), input, size), refused) << size;

    EXPECT_EQ(refusal(UniqueFd{::open("/dev/zero", O_RDWR)}, input), refused);
    EXPECT_EQ(refusal(UniqueFd{::open("/proc/self/exe", O_RDONLY)}, input), refused);
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    const UniqueFd write_end{pipe[1]};
    EXPECT_EQ(refusal(UniqueFd{pipe[0]}, input), refused);

    const auto half_of = [](std::uint64_t allocated) {
        UniqueFd fd{::memfd_create("holes", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
        EXPECT_EQ(::ftruncate(fd.get(), size_bytes), 0);
        EXPECT_EQ(::fallocate(fd.get(), 0, 0, static_cast<off_t>(allocated)), 0);
        EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE), 0);
        return fd;
    };
    EXPECT_EQ(refusal(half_of(size_bytes / 2), output), refused) << "reading its holes would take memory";
    EXPECT_TRUE(HostSlab::adopt(half_of(size_bytes), size_bytes, output));
}

/// The kilobytes of one line of a block of smaps.
std::uint64_t kib(const std::string& smaps, const std::string& key) {
    const std::size_t at = smaps.find("\n" + key + ":");
    return at == std::string::npos ? 0 : std::stoull(smaps.substr(at + key.size() + 2));
}

TEST(HostSlab, LiesOnHugePagesOrSaysWhyNot) {
    for (const auto direction : {input, output}) {
        const HostSlab slab = HostSlab::create(2 * huge_page_bytes, direction, "huge", SlabPages::huge).value();
        const HostSlab client = HostSlab::adopt(copy_of(slab), slab.size_bytes(), direction).value();

        slab.bytes().back() = std::byte{7};

        EXPECT_EQ(client.bytes().back(), std::byte{7});
        EXPECT_EQ(::ftruncate(slab.fd(), 0), -1);
        const std::string smaps = smaps_of(slab.bytes().data());
        const bool reserved = kib(smaps, "Shared_Hugetlb") + kib(smaps, "Private_Hugetlb") == 4096;
        const bool collapsed = kib(smaps, "ShmemPmdMapped") == 4096;
        EXPECT_EQ(reserved || collapsed, slab.plain_because().empty()) << slab.plain_because() << "\n" << smaps;
        if (!slab.plain_because().empty()) {
            EXPECT_NE(slab.plain_because().find("vm.nr_hugepages=2"), std::string::npos) << slab.plain_because();
        }
        EXPECT_NE(smaps.find(" dd "), std::string::npos) << smaps;
        EXPECT_NE(smaps_of(client.bytes().data()).find(" dc "), std::string::npos);
    }
}

/// Pages of 2 MiB that the kernel holds in reserve and nobody has taken.
std::uint64_t reserved_huge_pages() {
    std::uint64_t free = 0, promised = 0;
    const std::string folder = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
    std::ifstream{folder + "free_hugepages"} >> free;
    std::ifstream{folder + "resv_hugepages"} >> promised;
    return free - std::min(free, promised);
}

TEST(HostSlab, LiesOnTheKernelsReserveOfHugePagesWhereThatHasRoom) {
    if (reserved_huge_pages() < 2) GTEST_SKIP() << "the kernel has no 2 huge pages in reserve: sysctl vm.nr_hugepages";
    {
        const HostSlab slab = HostSlab::create(2 * huge_page_bytes, output, "huge", SlabPages::huge).value();
        const HostSlab client = HostSlab::adopt(copy_of(slab), slab.size_bytes(), output).value();
        slab.bytes()[huge_page_bytes] = std::byte{7};

        EXPECT_EQ(slab.plain_because(), "");
        EXPECT_EQ(client.bytes()[huge_page_bytes], std::byte{7});
        EXPECT_EQ(kib(smaps_of(slab.bytes().data()), "KernelPageSize"), 2048u);
        EXPECT_EQ(kib(smaps_of(client.bytes().data()), "KernelPageSize"), 2048u);
        EXPECT_EQ(::ftruncate(slab.fd(), 0), -1) << "sealed like any other";
    }
    EXPECT_GE(reserved_huge_pages(), 2u) << "all of it is back";
}

TEST(HostSlab, OfASizeThatIsNoWholeHugePageLiesOnPlainOnes) {
    const HostSlab slab = HostSlab::create(size_bytes, input, "odd", SlabPages::huge).value();

    EXPECT_NE(slab.plain_because().find("vm.nr_hugepages=1"), std::string::npos) << slab.plain_because();
    EXPECT_TRUE(HostSlab::create(size_bytes, input, "plain")->plain_because().empty());
}

TEST(HostSlab, MoreThanMemoryHasIsAnErrorThatNamesTheSize) {
    const Result<HostSlab> slab = HostSlab::create(std::uint64_t{1} << 60, input, "test");

    EXPECT_EQ(slab.error().code, ErrorCode::resources_exhausted);
    EXPECT_NE(slab.error().attempt.find("1152921504606846976 bytes"), std::string::npos);
    EXPECT_EQ(HostSlab::create(0, input, "test").error().code, ErrorCode::input_invalid);
}

TEST(HostSlab, LimitsOfTheProcessAreErrorsAndNoSignals) {
    EXPECT_EQ(signal_of_child([] {
                  const rlimit small{4096, 4096};
                  ::setrlimit(RLIMIT_FSIZE, &small);
                  if (HostSlab::create(size_bytes, input, "test").error().code != ErrorCode::resources_exhausted)
                      ::abort();
              }),
              0);
    EXPECT_EQ(signal_of_child([] {
                  const rlimit none{0, 0};
                  ::setrlimit(RLIMIT_NOFILE, &none);
                  if (HostSlab::create(size_bytes, input, "test").error().code != ErrorCode::resources_exhausted)
                      ::abort();
              }),
              0);
}

}  // namespace
}  // namespace bulkhead
