"""How the tests of perf/nccl and perf/torchrun run these: on software GPUs, with a shell script in the place of the program
that is measured."""
import json
import os
import subprocess


def run(tool, bin_folder, folder, name, program, *arguments):
    """Its exit status, what it reported as JSON, and what it printed."""
    with open(f'{folder}/{name}', 'w', encoding='utf-8') as script:
        script.write(program)
    os.chmod(f'{folder}/{name}', 0o755)
    file = folder + '/report.json'
    done = subprocess.run([tool, '--software', '--bin', bin_folder, '--json', file, '--transports', 'shm', *arguments], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, 'TMPDIR': folder}, check=False)
    print(done.stdout, done.stderr)
    with open(file, encoding='utf-8') as written:
        return done.returncode, json.load(written), done.stdout
