// A plugin of qemu-user that counts how often each translated block runs, exactly and from every thread. It writes
// "address instructions runs" for each to the file in $BLOCKS when the guest ends.
// These declarations are those of qemu-plugin.h, which Debian does not package.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned, void *), int flags, void *);
void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);

int qemu_plugin_version = 1;

// One for each translation: blocks that qemu translates again appear more than once.
struct block {
    uint64_t address, instructions, runs;
    struct block *next;
};
static struct block *blocks;

static void run(unsigned cpu, void *block)
{
    (void)cpu;
    __atomic_fetch_add(&((struct block *)block)->runs, 1, __ATOMIC_RELAXED);
}

static void translate(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
    (void)id;
    struct block *b = malloc(sizeof *b);
    if (!b)
        abort();
    *b = (struct block){ qemu_plugin_tb_vaddr(tb), qemu_plugin_tb_n_insns(tb), 0, __atomic_load_n(&blocks, __ATOMIC_RELAXED) };
    while (!__atomic_compare_exchange_n(&blocks, &b->next, b, 0, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
    }
    qemu_plugin_register_vcpu_tb_exec_cb(tb, run, 0, b);
}

static void end(qemu_plugin_id_t id, void *file)
{
    (void)id;
    FILE *out = fopen(file, "w");
    if (!out)
        abort();
    for (struct block *b = blocks; b; b = b->next)
        if (b->runs)
            fprintf(out, "%" PRIx64 " %" PRIu64 " %" PRIu64 "\n", b->address, b->instructions, b->runs);
    if (fclose(out))
        abort();
}

int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
    (void)info, (void)argc, (void)argv;
    char *file = getenv("BLOCKS");
    if (!file)
        return 1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
    qemu_plugin_register_atexit_cb(id, end, file);
    return 0;
}
