#include "tests/unit/keeper/process_facts.h"

#include <poll.h>

#include <chrono>
#include <filesystem>
#include <sstream>

#include "ipc/base/pidfd.h"

namespace bulkhead::test {
namespace {

constexpr std::chrono::milliseconds patience{20'000};

std::filesystem::path proc(pid_t pid) { return "/proc/" + std::to_string(pid); }

}  // namespace

std::map<int, std::string> descriptors_of(pid_t pid) {
    std::map<int, std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator{proc(pid) / "fd"})
        found[std::stoi(entry.path().filename())] = std::filesystem::read_symlink(entry.path());
    return found;
}

std::size_t descriptor_count(pid_t pid) { return descriptors_of(pid).size(); }

std::set<pid_t> children_of(pid_t pid) {
    std::istringstream list{file_text(proc(pid) / "task" / std::to_string(pid) / "children")};
    std::set<pid_t> found;
    for (pid_t child = 0; list >> child;) found.insert(child);
    return found;
}

std::string status_of(pid_t pid, const std::string& name) {
    std::istringstream lines{file_text(proc(pid) / "status")};
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with(name + ":")) return line.substr(line.find_first_not_of(" \t", name.size() + 1));
    return {};
}

std::vector<std::string> words_of(pid_t pid, const std::string& file) {
    std::istringstream text{file_text(proc(pid) / file)};
    std::vector<std::string> words;
    for (std::string word; std::getline(text, word, '\0');) words.push_back(word);
    return words;
}

UniqueFd hold(pid_t pid) { return pidfd_of(pid); }
bool ends(const UniqueFd& pidfd) { return ends_within(pidfd, patience); }
bool is_alive(const UniqueFd& pidfd) { return !ends_within(pidfd, {}); }
bool readable(int fd) {
    pollfd source{fd, POLLIN, 0};
    return ::poll(&source, 1, static_cast<int>(patience.count())) == 1;
}

}  // namespace bulkhead::test
